//! In place of a guest's agent, in a guest that means harm: each connection of the host becomes the standard input of a
//! program, which may write to it, too.

use std::io;
use std::process::{Child, Command, ExitCode};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SocketFlags, accept_with};

/// Serves the vsock port, one connection after the other; a new one ends the program of the last.
pub(crate) fn serve(port: &str, program: &str, arguments: &[&str]) -> ExitCode {
    let error = match port.parse() {
        Ok(port) => match converse(port, program, arguments) {
            Ok(never) => match never {},
            Err(error) => error,
        },
        Err(_) => io::Error::from(io::ErrorKind::InvalidInput),
    };
    eprintln!("vsock port {port}: {error}");
    ExitCode::FAILURE
}

fn converse(port: u32, program: &str, arguments: &[&str]) -> io::Result<std::convert::Infallible> {
    let listener = imp_sys::vsock::listen(port)?;
    // The host waits for this.
    if let Err(error) = imp_sys::vsock::connect_to_host(port) {
        eprintln!("nobody waits: {error}");
    }
    let mut last: Option<Child> = None;
    loop {
        poll(&mut [PollFd::new(&listener, PollFlags::IN)], None)?;
        let connection = match accept_with(&listener, SocketFlags::CLOEXEC) {
            Ok(connection) => connection,
            Err(rustix::io::Errno::AGAIN) => continue,
            Err(error) => return Err(error.into()),
        };
        if let Some(mut child) = last.take() {
            // One that has ended already is as good.
            let _ = child.kill();
            child.wait()?;
        }
        last = Some(Command::new(program).args(arguments).stdin(connection).spawn()?);
    }
}
