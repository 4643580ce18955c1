//! Leads connections on this machine to a port of a guest.
//!
//! A connection that breaks on one side is reset on the other: half of what was to be said must not pass for all of it.

use std::io;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::ports_client::PortsClient;
use imp_protocol::guest::{CloseStdin, ForwardInput, OpenPort, forward_input, forward_output};
use rustix::net::sockopt::set_socket_linger;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// Connections to one port at a time; further ones wait in the kernel's queue.
const MOST: usize = 256;
const CHUNK: usize = 64 << 10;
/// Pieces on their way.
const QUEUE: usize = 4;
/// How long a listener rests when the process has no descriptor left for another connection.
const REST: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a connection cannot be accepted")]
    Accept(#[source] io::Error),
    /// The guest, or the way to it: the message is meant for the user.
    #[error("{}", .0.message())]
    Guest(Box<Status>),
    #[error("the connection on this machine failed")]
    Here(#[from] io::Error),
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Guest(Box::new(status))
    }
}

/// Leads on what comes to `listener`, for good; when this is dropped, what is not at its end is reset. `guest`: the
/// connection to its agent, if there is one; without it, what comes is closed. `failed` is told of each connection that
/// did not come to its end.
pub async fn accept<F>(
    listener: TcpListener,
    port: NonZeroU16,
    guest: impl Fn() -> Option<Connection>,
    failed: F,
) where
    F: Fn(Error) + Clone + Send + 'static,
{
    let places = Arc::new(Semaphore::new(MOST));
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                failed(Error::Accept(error));
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let (connection, failed) = (guest(), failed.clone());
        connections.spawn(async move {
            if let Some(connection) = connection
                && let Err(error) = forward(stream, port, connection).await
            {
                failed(error);
            }
            drop(place);
        });
    }
}

/// One connection, until both sides have said all.
async fn forward(mut stream: TcpStream, port: NonZeroU16, connection: Connection) -> Result<(), Error> {
    stream.set_nodelay(true)?;
    // Closed before its end, whatever the reason, it is reset.
    set_socket_linger(&stream, Some(Duration::ZERO)).map_err(io::Error::from)?;
    let (read, write) = stream.split();
    let (sender, inputs) = mpsc::channel(QUEUE);
    let open = OpenPort { port: u32::from(port.get()), address: String::new() };
    // Room for it: the queue is empty.
    let _ = sender.try_send(ForwardInput { input: Some(forward_input::Input::Open(open)) });
    let outputs = PortsClient::new(connection).forward(ReceiverStream::new(inputs)).await?.into_inner();
    tokio::try_join!(to_guest(read, sender), to_client(outputs, write))?;
    Ok(set_socket_linger(&stream, None).map_err(io::Error::from)?)
}

async fn to_guest(mut read: ReadHalf<'_>, sender: mpsc::Sender<ForwardInput>) -> Result<(), Error> {
    let mut buffer = vec![0; CHUNK];
    loop {
        // The guest hanging up ends the wait for a client that says nothing more.
        let count = tokio::select! {
            count = read.read(&mut buffer) => count?,
            () = sender.closed() => return Ok(()),
        };
        let data = buffer.get(..count).unwrap_or_default();
        let input = if data.is_empty() {
            forward_input::Input::ShutDownWrite(CloseStdin {})
        } else {
            forward_input::Input::Data(Bytes::copy_from_slice(data))
        };
        let ends = matches!(input, forward_input::Input::ShutDownWrite(_));
        if sender.send(ForwardInput { input: Some(input) }).await.is_err() || ends {
            return Ok(());
        }
    }
}

async fn to_client(
    mut outputs: tonic::Streaming<imp_protocol::guest::ForwardOutput>,
    mut write: WriteHalf<'_>,
) -> Result<(), Error> {
    while let Some(output) = outputs.message().await? {
        match output.output {
            Some(forward_output::Output::Data(data)) => write.write_all(&data).await?,
            Some(forward_output::Output::Opened(_)) | None => {}
        }
    }
    Ok(write.shutdown().await?)
}

#[cfg(test)]
mod tests {
    use imp_protocol::connection;
    use imp_protocol::guest::ForwardOutput;
    use imp_protocol::guest::ports_server::{Ports, PortsServer};
    use tonic::{Request, Response, Streaming};

    use super::*;

    /// A guest that tells what it hears, and answers half of something.
    struct Guest(mpsc::Sender<Option<forward_input::Input>>);

    #[tonic::async_trait]
    impl Ports for Guest {
        type ForwardStream = ReceiverStream<Result<ForwardOutput, Status>>;

        async fn forward(
            &self,
            request: Request<Streaming<ForwardInput>>,
        ) -> Result<Response<Self::ForwardStream>, Status> {
            let (mut inputs, heard) = (request.into_inner(), self.0.clone());
            let (outputs, answers) = mpsc::channel(4);
            tokio::spawn(async move {
                let half = forward_output::Output::Data(Bytes::from_static(b"half"));
                let _ = outputs.send(Ok(ForwardOutput { output: Some(half) })).await;
                while let Ok(Some(input)) = inputs.message().await {
                    let breaks =
                        matches!(&input.input, Some(forward_input::Input::Data(data)) if data == "break");
                    let _ = heard.send(input.input).await;
                    if breaks {
                        let _ = outputs.send(Err(Status::aborted("broken"))).await;
                    }
                }
                let _ = heard.send(None).await;
            });
            Ok(Response::new(ReceiverStream::new(answers)))
        }
    }

    /// A client of a port, what the guest hears of it, and what keeps the port open.
    async fn client()
    -> (TcpStream, mpsc::Receiver<Option<forward_input::Input>>, tokio_util::task::AbortOnDropHandle<()>)
    {
        let (heard, hears) = mpsc::channel(16);
        let (near, far) = tokio::net::UnixStream::pair().unwrap();
        tokio::spawn(connection::serve(far, tonic::service::Routes::new(PortsServer::new(Guest(heard)))));
        let guest = connection::connect_owner(near).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = accept(listener, NonZeroU16::MIN, move || Some(guest.clone()), |_| {});
        let accepting = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(accepting));
        let mut client = TcpStream::connect(address).await.unwrap();
        let mut half = [0; 4];
        client.read_exact(&mut half).await.unwrap();
        assert_eq!(&half, b"half");
        (client, hears, accepting)
    }

    #[tokio::test]
    async fn the_end_of_a_client_is_told_and_its_break_is_not_taken_for_one() {
        for breaks in [false, true] {
            let (mut client, mut hears, _accepting) = client().await;
            client.write_all(b"x").await.unwrap();
            while hears.recv().await.unwrap() != Some(forward_input::Input::Data(Bytes::from_static(b"x"))) {}
            if breaks {
                set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
            }
            drop(client);
            let end = hears.recv().await.unwrap();
            assert_eq!(end.is_none(), breaks, "{end:?}");
        }
    }

    #[tokio::test]
    async fn a_client_does_not_take_a_break_in_the_guest_or_of_the_way_to_it_for_the_end() {
        let (mut client, _hears, _accepting) = client().await;
        client.write_all(b"break").await.unwrap();
        assert_eq!(client.read(&mut [0]).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);

        let (mut client, _hears, accepting) = self::client().await;
        drop(accepting);
        assert_eq!(client.read(&mut [0]).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
