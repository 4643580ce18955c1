//! Answers the test: one thread reads the channel, every conversation has threads of its own.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::process::ExitCode;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::Context as _;
use imp_testkit_node::wire::{Frame, Message, PORT};

use super::program::{self, Input};

/// The side of the channel that the conversations' threads share.
#[derive(Clone)]
pub(super) struct Answers(Arc<Mutex<File>>);

impl Answers {
    pub(super) fn send(&self, conversation: u32, message: Message) -> io::Result<()> {
        let port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Frame::new(conversation, message).write(&*port)
    }
}

pub(crate) fn serve() -> ExitCode {
    match answer() {
        Ok(()) => super::say("the test has gone"),
        Err(error) => super::say(&format!("{error:#}")),
    }
    ExitCode::FAILURE
}

/// Until the channel ends.
fn answer() -> anyhow::Result<()> {
    let port = open_port()?;
    let answers = Answers(Arc::new(Mutex::new(port.try_clone()?)));
    answers.send(0, Message::Ready)?;
    let mut inputs: HashMap<u32, Sender<Input>> = HashMap::new();
    while let Some(Frame { conversation, message }) = Frame::read(&port)? {
        match message {
            Message::Run(program) => {
                let (input, queue) = std::sync::mpsc::channel();
                inputs.insert(conversation, input);
                let answers = answers.clone();
                thread::spawn(move || program::run(&program, conversation, queue, &answers));
            }
            Message::Input(bytes) => pass_on(&mut inputs, conversation, Input::Bytes(bytes)),
            Message::EndOfInput => pass_on(&mut inputs, conversation, Input::End),
            Message::Kill => program::kill(conversation),
            Message::Ready | Message::Output(_) | Message::Errors(_) | Message::Took(_) | Message::End(_) => {
                anyhow::bail!("the test sent what only a node sends");
            }
        }
    }
    Ok(())
}

/// A program that has ended takes nothing more.
fn pass_on(inputs: &mut HashMap<u32, Sender<Input>>, conversation: u32, input: Input) {
    let last = matches!(input, Input::End);
    let gone = inputs.get(&conversation).is_none_or(|queue| queue.send(input).is_err());
    if last || gone {
        inputs.remove(&conversation);
    }
}

/// The port must be opened once and stay open: on a close the driver throws away what has arrived.
fn open_port() -> anyhow::Result<File> {
    for entry in fs::read_dir("/sys/class/virtio-ports").context("there is no virtio-serial device")? {
        let entry = entry?;
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim_end() == PORT {
            let device = std::path::Path::new("/dev").join(entry.file_name());
            return OpenOptions::new()
                .read(true)
                .write(true)
                .open(&device)
                .with_context(|| format!("opening {}", device.display()));
        }
    }
    anyhow::bail!("no port is called {PORT}")
}
