//! How a client gets the lane of a VM: from the owner, which connects to it, as a descriptor.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::TAKEN;

/// Bytes of the longest id of a VM that an owner reads.
pub const LONGEST_ID: usize = 128;
/// How long an owner may take: longer than it waits for an agent.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often a thread that waits for the agent looks whether the call still goes on.
const LOOK: Duration = Duration::from_secs(1);

/// The client's end of a lane, for threads that may block. It is the client's alone until the last clone is dropped, which
/// must not be before the call has been answered: a VMM throws away what it has not read of a client that hangs up.
#[derive(Debug, Clone)]
pub struct Lane(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    stream: UnixStream,
    number: u64,
    call_ended: AtomicBool,
    /// While it lives, the owner gives the lane to nobody else. None: this is the owner.
    _owner: Option<UnixStream>,
}

impl Lane {
    /// Asks the owner that listens on `socket`. Any error means that there is no lane, and that a call does without.
    pub fn ask(socket: &Path, vm: &str) -> io::Result<Self> {
        let mut owner = UnixStream::connect(socket)?;
        owner.set_read_timeout(Some(PATIENCE))?;
        owner.set_write_timeout(Some(PATIENCE))?;
        owner.write_all(format!("{vm}\n").as_bytes())?;
        let (stream, number) = receive(&owner)?;
        Self::new(stream.into(), number, Some(owner))
    }

    /// The owner's own, greeted under this number.
    pub fn of_owner(stream: UnixStream, number: u64) -> io::Result<Self> {
        Self::new(stream, number, None)
    }

    fn new(stream: UnixStream, number: u64, owner: Option<UnixStream>) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LOOK))?;
        Ok(Self(Arc::new(Shared { stream, number, call_ended: AtomicBool::new(false), _owner: owner })))
    }

    /// What a call that is to use this lane says.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Waits until a call has taken the lane; an error says that none will.
    pub fn taken(&mut self) -> io::Result<()> {
        let mut said = [0];
        self.read_exact(&mut said)?;
        if said == [TAKEN] { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// The call has ended well: what the agent has sent may still be on its way, but it sends nothing more.
    pub fn call_ended(&self) {
        self.0.call_ended.store(true, Ordering::Release);
    }

    /// Ends the lane, whoever reads or writes it: the call has failed, or must.
    pub fn hang_up(&self) {
        // It fails when the other end is gone already.
        let _ = self.0.stream.shutdown(Shutdown::Both);
    }
}

impl Read for Lane {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let nothing_more = self.0.call_ended.load(Ordering::Acquire);
            match (&self.0.stream).read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !nothing_more => {}
                read => return read,
            }
        }
    }
}

impl Write for Lane {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&self.0.stream).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Gives a lane to the client at the other end of a socket. Does not wait: the client has sent one line and reads.
pub fn give(client: impl AsFd, lane: impl AsFd, number: u64) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let lanes = [lane.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&lanes));
    let number = number.to_be_bytes();
    let sent =
        sendmsg(client, &[IoSlice::new(&number)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    if sent == number.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

fn receive(owner: &UnixStream) -> io::Result<(OwnedFd, u64)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut number = [0; 8];
    let received =
        recvmsg(owner, &mut [IoSliceMut::new(&mut number)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let lane = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut lanes) => lanes.next(),
        _ => None,
    });
    match lane {
        Some(lane) if received.bytes == number.len() => Ok((lane, u64::from_be_bytes(number))),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_client_gets_the_lane_itself_and_the_owner_sees_when_it_is_free_again() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("lanes.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (ours, mut agents) = UnixStream::pair().unwrap();
        let owner = std::thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(&client);
            let mut vm = String::new();
            reader.read_line(&mut vm).unwrap();
            give(&client, ours, 0x0102_0304_0506_0708).unwrap();
            let end = reader.read(&mut [0]).unwrap();
            (vm, end)
        });
        let mut lane = Lane::ask(&socket, "vm7").unwrap();
        assert_eq!(lane.number(), 0x0102_0304_0506_0708);
        agents.write_all(&[TAKEN]).unwrap();
        lane.taken().unwrap();
        lane.write_all(b"archive").unwrap();
        assert!(!owner.is_finished());
        drop(lane);
        assert_eq!(owner.join().unwrap(), ("vm7\n".to_owned(), 0));
        let mut sent = String::new();
        agents.read_to_string(&mut sent).unwrap();
        assert_eq!(sent, "archive");
    }

    #[test]
    fn an_agent_that_says_nothing_more_holds_nobody_up_once_its_call_has_ended() {
        let (ours, mut agents) = UnixStream::pair().unwrap();
        let (owner, _client) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let shared =
            Shared { stream: ours, number: 1, call_ended: AtomicBool::new(false), _owner: Some(owner) };
        let mut lane = Lane(Arc::new(shared));
        agents.write_all(b"rest").unwrap();
        let reader = std::thread::spawn({
            let mut lane = lane.clone();
            move || {
                let mut read = Vec::new();
                let error = lane.read_to_end(&mut read).unwrap_err();
                (read, error.kind())
            }
        });
        lane.call_ended();
        assert_eq!(reader.join().unwrap(), (b"rest".to_vec(), io::ErrorKind::WouldBlock));
        lane.hang_up();
        assert_eq!(lane.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn an_owner_that_hangs_up_has_no_lane() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("lanes.sock");
        assert!(Lane::ask(&socket, "vm7").is_err());
        let listener = UnixListener::bind(&socket).unwrap();
        let owner = std::thread::spawn(move || drop(listener.accept().unwrap()));
        assert!(Lane::ask(&socket, "vm7").is_err());
        owner.join().unwrap();
    }
}
