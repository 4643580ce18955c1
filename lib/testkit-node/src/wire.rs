//! Many conversations over the one byte channel between a test and its node: each runs one program.
//!
//! ```text
//! node ─► Ready                                              once, conversation 0
//! test ─► Run ─► Input* ─► EndOfInput        or Kill at any time
//! node ─► (Output | Errors | Took)* ─► End
//!
//! frame = kind u8, conversation u32, length u32 (little endian), payload
//! ```
//!
//! Neither side may stop reading. So that a program that does not read its input fills no memory, the test sends at most
//! [`WINDOW`] bytes of input more than the node says the program took.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Most bytes of a payload.
pub const MOST: usize = 1 << 20;
/// Bytes of input that may be on their way to one program.
pub const WINDOW: usize = 1 << 20;
/// Bytes of input or output per frame.
pub const CHUNK: usize = 64 << 10;
/// Name of the virtio-serial port.
pub const PORT: &str = "imp.node.0";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the channel failed")]
    Channel(#[from] io::Error),
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    #[error("a frame of {0} bytes, more than {MOST}")]
    Size(usize),
    #[error("a frame of kind {kind} whose payload is not of that kind")]
    Payload { kind: u8 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub conversation: u32,
    pub message: Message,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    Ready,
    Run(Program),
    Input(Vec<u8>),
    EndOfInput,
    /// Ends the program and all that it started.
    Kill,
    Output(Vec<u8>),
    Errors(Vec<u8>),
    /// So many bytes of input went to the program.
    Took(u32),
    End(End),
}

/// A program to run in the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The program first; looked for in `PATH` of `environment` unless it has a slash.
    pub arguments: Vec<String>,
    /// The whole environment.
    pub environment: BTreeMap<String, String>,
    pub directory: PathBuf,
}

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    Exited(i32),
    Signalled(i32),
    NotStarted(String),
}

impl Frame {
    #[must_use]
    pub fn new(conversation: u32, message: Message) -> Self {
        Self { conversation, message }
    }

    /// Writes the frame in one call, so that frames of several threads need no more than a lock around it.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        let payload = self.message.payload()?;
        let length = u32::try_from(payload.len()).map_err(io::Error::other)?;
        let mut bytes = Vec::with_capacity(9 + payload.len());
        bytes.push(self.message.kind());
        bytes.extend_from_slice(&self.conversation.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&payload);
        to.write_all(&bytes)
    }

    /// The next frame; `None` when the channel ends between two.
    pub fn read(mut from: impl Read) -> Result<Option<Self>, Error> {
        let mut kind = [0];
        loop {
            match from.read(&mut kind) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        let conversation = u32::from_le_bytes(read_four(&mut from)?);
        let length = u32::from_le_bytes(read_four(&mut from)?) as usize;
        if length > MOST {
            return Err(Error::Size(length));
        }
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        Ok(Some(Self { conversation, message: Message::parse(kind, payload)? }))
    }
}

fn read_four(from: &mut impl Read) -> io::Result<[u8; 4]> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl Message {
    fn kind(&self) -> u8 {
        match self {
            Self::Ready => 0,
            Self::Run(_) => 1,
            Self::Input(_) => 2,
            Self::EndOfInput => 3,
            Self::Kill => 4,
            Self::Output(_) => 5,
            Self::Errors(_) => 6,
            Self::Took(_) => 7,
            Self::End(_) => 8,
        }
    }

    fn payload(&self) -> io::Result<Vec<u8>> {
        Ok(match self {
            Self::Ready | Self::EndOfInput | Self::Kill => Vec::new(),
            Self::Input(bytes) | Self::Output(bytes) | Self::Errors(bytes) => bytes.clone(),
            Self::Took(count) => count.to_le_bytes().to_vec(),
            Self::Run(program) => serde_json::to_vec(program)?,
            Self::End(end) => serde_json::to_vec(end)?,
        })
    }

    fn parse([kind]: [u8; 1], payload: Vec<u8>) -> Result<Self, Error> {
        let wrong = Error::Payload { kind };
        Ok(match kind {
            0 => Self::Ready,
            1 => Self::Run(serde_json::from_slice(&payload).map_err(|_| wrong)?),
            2 => Self::Input(payload),
            3 => Self::EndOfInput,
            4 => Self::Kill,
            5 => Self::Output(payload),
            6 => Self::Errors(payload),
            7 => Self::Took(u32::from_le_bytes(payload.try_into().map_err(|_| wrong)?)),
            8 => Self::End(serde_json::from_slice(&payload).map_err(|_| wrong)?),
            other => return Err(Error::Kind(other)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let program = Program {
            arguments: vec!["sh".into(), "-c".into(), "echo ä".into()],
            environment: [("NAME".to_owned(), "a=b".to_owned())].into(),
            directory: "/tmp".into(),
        };
        let messages = [
            Message::Ready,
            Message::Run(program),
            Message::Input(b"in".to_vec()),
            Message::EndOfInput,
            Message::Kill,
            Message::Output(vec![0; CHUNK]),
            Message::Errors(Vec::new()),
            Message::Took(70_000),
            Message::End(End::Exited(3)),
            Message::End(End::NotStarted("no".into())),
        ];
        let mut bytes = Vec::new();
        for (number, message) in (7..).zip(&messages) {
            Frame::new(number, message.clone()).write(&mut bytes).unwrap();
        }
        let mut from = bytes.as_slice();
        for (number, message) in (7..).zip(messages) {
            assert_eq!(Frame::read(&mut from).unwrap(), Some(Frame::new(number, message)));
        }
        assert_eq!(Frame::read(&mut from).unwrap(), None);
    }

    #[test]
    fn what_is_no_frame_is_an_error_and_not_a_wait_for_gigabytes() {
        let mut large = vec![2, 1, 0, 0, 0];
        large.extend_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(Frame::read(large.as_slice()), Err(Error::Size(_))));
        assert!(matches!(Frame::read([200, 0, 0, 0, 0, 0, 0, 0, 0].as_slice()), Err(Error::Kind(200))));
        assert!(matches!(
            Frame::read([7, 0, 0, 0, 0, 1, 0, 0, 0, 9].as_slice()),
            Err(Error::Payload { kind: 7 })
        ));
        assert!(matches!(Frame::read([2, 0, 0].as_slice()), Err(Error::Channel(_))));
    }
}
