//! How the agent asks PID 1 to become the image's own init.
//!
//! The agent writes the request to a socket that PID 1 watches. PID 1 executes the init; that closes its end of the socket
//! (close-on-exec), which tells the agent that it worked. An answer is an error number.

use std::ffi::{CString, OsStr};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::processes::spec::Launch;

/// Entry point that stands for whatever init the image has.
const ANY_INIT: &[u8] = b"/.imp/init";
/// Entry points that are an init system.
const INITS: [&[u8]; 5] =
    [ANY_INIT, b"/sbin/init", b"/usr/sbin/init", b"/lib/systemd/systemd", b"/usr/lib/systemd/systemd"];
/// Where an image's init may be, in the order of the kernel and of distributions.
const CANDIDATES: [&str; 6] = [
    "/sbin/init",
    "/usr/sbin/init",
    "/etc/init",
    "/bin/init",
    "/lib/systemd/systemd",
    "/usr/lib/systemd/systemd",
];
/// Longest request that PID 1 reads: what execve takes.
const LONGEST: usize = 4 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("PID 1 did not take the request to become the image's init")]
    Channel(#[source] io::Error),
    #[error("the image's init could not be executed")]
    Program(#[source] io::Error),
}

/// Whether these are the arguments of an init system.
pub(crate) fn is_init(arguments: &[CString]) -> bool {
    arguments.first().is_some_and(|program| INITS.contains(&program.to_bytes()))
}

/// The agent's end.
#[derive(Debug)]
pub struct Supervisor(Mutex<UnixStream>);

impl Supervisor {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self(Mutex::new(socket))
    }

    /// Returns when PID 1 has become the init.
    pub(crate) fn become_init(&self, launch: &Launch) -> Result<(), Error> {
        let request = Request::of(launch).encode();
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        socket.write_all(&request).map_err(Error::Channel)?;
        let mut answer = [0; 4];
        match socket.read_exact(&mut answer) {
            Ok(()) => Err(Error::Program(io::Error::from_raw_os_error(i32::from_le_bytes(answer)))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            Err(error) => Err(Error::Channel(error)),
        }
    }
}

/// PID 1's end.
#[derive(Debug)]
pub(crate) struct Requests(UnixStream);

impl Requests {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self(socket)
    }

    /// The request that has arrived. None: the agent has closed its end, and nothing more comes.
    pub(crate) fn next(&mut self) -> Option<Request> {
        Request::read_from(&mut self.0).ok()
    }

    /// Becomes the init; returns only when that failed, with the agent told why. False: it could not be told.
    pub(crate) fn execute(&mut self, request: &Request) -> bool {
        let errno = request.execute().raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error());
        self.0.write_all(&errno.to_le_bytes()).is_ok()
    }
}

impl AsFd for Requests {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    programs: Vec<Vec<u8>>,
    arguments: Vec<Vec<u8>>,
    environment: Vec<Vec<u8>>,
}

impl Request {
    fn of(launch: &Launch) -> Self {
        let bytes =
            |strings: &[CString]| strings.iter().map(|string| string.to_bytes().to_vec()).collect::<Vec<_>>();
        let (mut programs, mut arguments) = (bytes(&launch.programs), bytes(&launch.arguments));
        if arguments.first().is_some_and(|program| program == ANY_INIT) {
            arguments.remove(0);
            match arguments.first() {
                Some(program) => programs = vec![program.clone()],
                None => {
                    programs = CANDIDATES.iter().map(|program| program.as_bytes().to_vec()).collect();
                    arguments = vec![b"/sbin/init".to_vec()];
                }
            }
        }
        Self { programs, arguments, environment: bytes(&launch.environment) }
    }

    /// Total length, then three lists: count, then length and bytes of each; numbers are 32 bits, little-endian.
    fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for list in [&self.programs, &self.arguments, &self.environment] {
            body.extend_from_slice(&(list.len() as u32).to_le_bytes());
            for string in list {
                body.extend_from_slice(&(string.len() as u32).to_le_bytes());
                body.extend_from_slice(string);
            }
        }
        [&(body.len() as u32).to_le_bytes()[..], &body].concat()
    }

    fn read_from(socket: &mut impl Read) -> io::Result<Self> {
        let mut length = [0; 4];
        socket.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; length];
        socket.read_exact(&mut body)?;
        let mut rest = body.as_slice();
        let mut list = || -> Option<Vec<Vec<u8>>> {
            let count = take_number(&mut rest)?;
            (0..count).map(|_| take_string(&mut rest)).collect()
        };
        let parsed = (|| Some(Self { programs: list()?, arguments: list()?, environment: list()? }))();
        parsed.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn execute(&self) -> io::Error {
        let mut failure = io::Error::from(rustix::io::Errno::NOENT);
        for program in &self.programs {
            let mut command = Command::new(OsStr::from_bytes(program));
            let mut arguments = self.arguments.iter().map(|argument| OsStr::from_bytes(argument));
            if let Some(name) = arguments.next() {
                command.arg0(name);
            }
            command.args(arguments).env_clear();
            for entry in &self.environment {
                let equals = entry.iter().position(|byte| *byte == b'=').unwrap_or(entry.len());
                let (name, value) = entry.split_at(equals);
                let value = std::ffi::OsString::from_vec(value.get(1..).unwrap_or_default().to_vec());
                command.env(OsStr::from_bytes(name), value);
            }
            let error = command.exec();
            if error.kind() != io::ErrorKind::NotFound {
                failure = error;
            }
        }
        failure
    }
}

fn take_number(rest: &mut &[u8]) -> Option<u32> {
    let (number, after) = rest.split_first_chunk::<4>()?;
    *rest = after;
    Some(u32::from_le_bytes(*number))
}

fn take_string(rest: &mut &[u8]) -> Option<Vec<u8>> {
    let length = take_number(rest)? as usize;
    let (string, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(string.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        let list = |words: &[&str]| words.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>();
        Request {
            programs: list(&["/nonexistent/a", "/nonexistent/b"]),
            arguments: list(&["a", ""]),
            environment: list(&["A=b=c"]),
        }
    }

    #[test]
    fn a_request_arrives_as_it_was_sent() {
        assert_eq!(Request::read_from(&mut request().encode().as_slice()).unwrap(), request());
    }

    #[test]
    fn a_broken_request_is_refused_without_reading_on() {
        let whole = request().encode();
        for end in 0..whole.len() {
            assert!(Request::read_from(&mut &whole[..end]).is_err());
        }
        let mut huge = whole.clone();
        huge[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Request::read_from(&mut huge.as_slice()).is_err());
        let mut count = whole;
        count[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Request::read_from(&mut count.as_slice()).is_err());
    }

    #[test]
    fn the_agent_is_told_when_there_is_no_init() {
        let (agent, init) = UnixStream::pair().unwrap();
        let mut requests = Requests::new(init);
        (&agent).write_all(&request().encode()).unwrap();
        let taken = requests.next().unwrap();
        assert_eq!(taken, request());
        assert!(requests.execute(&taken));
        let mut answer = [0; 4];
        (&agent).read_exact(&mut answer).unwrap();
        assert_eq!(i32::from_le_bytes(answer), rustix::io::Errno::NOENT.raw_os_error());
        drop(agent);
        assert_eq!(requests.next(), None);
        assert!(!requests.execute(&taken));
    }
}
