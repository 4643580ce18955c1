//! Follows the main process and records its output.

use imp_protocol::causes::chain;

use super::steps::{Told, setup};
use super::{Vm, spawn};
use crate::guest::{self, Heard, Request};
use crate::lifecycle::Input;
use crate::logs::LogWriter;
use crate::status::Failure;

impl Vm {
    pub(super) fn follow_main(&mut self, request: Request) {
        let Some(connection) = self.connection.borrow().clone() else { return };
        let Some(log) = self.log.clone() else { return };
        let (guest, directory) = (self.guest(), self.layout.logs());
        self.step = Some(spawn(async move {
            let opened = tokio::task::spawn_blocking(move || LogWriter::open(&directory, log)).await;
            let log = match opened {
                Ok(Ok(log)) => log,
                Ok(Err(error)) => {
                    return guest.tell(Input::Failed(setup(&error)));
                }
                Err(_) => return,
            };
            let mut recording = Recording { log, guest: &guest };
            let mut expected = match request {
                Request::Start { .. } => Expected::Start,
                Request::Attach => Expected::End,
            };
            let heard = |heard: Heard| {
                expected = Expected::End;
                match heard {
                    Heard::Started => guest.tell(Input::MainStarted),
                    Heard::Lost(lost) => guest.lost(lost),
                }
            };
            let followed = guest::follow(&connection, request, &mut recording.log, heard).await;
            // Before its end, by which all is known.
            drop(recording);
            let error = match followed {
                Ok(outcome) => return guest.tell(Input::MainEnded(outcome)),
                Err(error) => error,
            };
            tracing::debug!(error = chain(&error), "the main process is no longer followed");
            let input = match expected {
                Expected::Start => Input::Failed(setup(&error)),
                // The channel works, and an agent that was started again knows of no process.
                Expected::End if error.is_not_found() => Input::Failed(Failure::MainLost),
                Expected::End => Input::ChannelLost,
            };
            guest.broken(&connection, input).await;
        }));
    }
}

/// A log that is written to. It ends with this value, also when the task that has it is ended because the machine is gone.
struct Recording<'a> {
    log: LogWriter,
    guest: &'a Told,
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if let Some(lost) = self.log.end() {
            self.guest.lost(lost);
        }
    }
}

/// What is to be heard next of the main process. Before its start an error is a failure; after it the channel is at fault.
enum Expected {
    Start,
    End,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{mpsc, watch};

    use super::super::Message;
    use super::*;
    use crate::logs::LogStream;

    #[tokio::test]
    async fn what_was_lost_is_told_also_when_the_task_that_records_is_ended() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = LogWriter::open(directory.path(), Arc::new(watch::channel(0).0)).unwrap();
        drop(log.fill_its_disk());
        log.append(LogStream::Stdout, b"told");
        assert_eq!(log.news_of_losses().map(|lost| lost.bytes), Some(4));
        log.append(LogStream::Stdout, b"not");
        assert_eq!(log.news_of_losses(), None);
        let (messages, mut inbox) = mpsc::unbounded_channel();
        let guest = Told { messages, vmm: None };
        let (began, begins) = tokio::sync::oneshot::channel();
        let task = spawn(async move {
            let _recording = Recording { log, guest: &guest };
            began.send(()).unwrap();
            std::future::pending().await
        });
        begins.await.unwrap();
        drop(task);
        let Some(Message::Lost(lost)) = inbox.recv().await else { panic!("nothing was told") };
        assert_eq!(lost.bytes, 3);
        assert!(inbox.recv().await.is_none());
    }
}
