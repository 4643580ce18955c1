//! TCP connections of the machine before, which this one shares with it: ended without a word to the other side.
//!
//! Those over loopback have both their ends here, and live on, as do sockets that listen. The sockets are taken from the
//! processes that hold them, which are frozen; so it needs no module of the kernel, and reaches into the namespaces of
//! containers.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// States of the kernel's table in which nothing is left of a connection that a process could use, or nothing yet.
const TIME_WAIT: u8 = 6;
const CLOSE: u8 = 7;
const LISTEN: u8 = 10;
const ESTABLISHED: u8 = 1;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "{0} connections of the machine before live on: no process holds them, or none that can be reached"
    )]
    Left(usize),
    #[error("a connection of the machine before cannot be ended")]
    End(#[source] io::Error),
}

/// `processes`: all that may hold one.
pub(super) fn repair(processes: &[u32]) -> Result<(), Error> {
    let namespaces = namespaces(processes);
    let doomed: HashSet<u64> =
        namespaces.values().flat_map(|pid| connections(*pid)).map(|connection| connection.inode).collect();
    if doomed.is_empty() {
        return Ok(());
    }
    let mut failure = None;
    for pid in processes {
        for descriptor in sockets(*pid).into_iter().filter(|(_, inode)| doomed.contains(inode)) {
            failure = end(*pid, descriptor.0).err().or(failure);
        }
    }
    let left = namespaces
        .values()
        .flat_map(|pid| connections(*pid))
        .filter(|connection| connection.state == ESTABLISHED)
        .count();
    match (left, failure) {
        (0, _) => Ok(()),
        (_, Some(failure)) => Err(Error::End(failure)),
        (left, None) => Err(Error::Left(left)),
    }
}

/// One process in each network namespace; the agent's own is among them.
fn namespaces(processes: &[u32]) -> HashMap<u64, u32> {
    let with_own = processes.iter().copied().chain([std::process::id()]);
    with_own.filter_map(|pid| Some((fs::metadata(format!("/proc/{pid}/ns/net")).ok()?.ino(), pid))).collect()
}

fn connections(pid: u32) -> Vec<Connection> {
    let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")));
    tables.iter().flatten().flat_map(|table| parse(table)).collect()
}

/// Descriptors of a process that are sockets, each with its number in the kernel's tables.
fn sockets(pid: u32) -> Vec<(i32, u64)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let link = fs::read_link(entry.path()).ok()?;
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
            Some((entry.file_name().to_str()?.parse().ok()?, inode))
        })
        .collect()
}

fn end(pid: u32, descriptor: i32) -> io::Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let socket = pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty())?;
    imp_sys::tcp::end_silently(socket)
}

/// A connection that is neither over loopback nor over.
#[derive(Debug, PartialEq, Eq)]
struct Connection {
    inode: u64,
    state: u8,
}

/// The kernel's table in /proc/net/tcp or tcp6.
fn parse(table: &str) -> Vec<Connection> {
    table.lines().skip(1).filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Connection> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (local, remote) = (address(fields.get(1)?)?, address(fields.get(2)?)?);
    let state = u8::from_str_radix(fields.get(3)?, 16).ok()?;
    let inode = fields.get(9)?.parse().ok()?;
    // Also with its own address a machine reaches itself over loopback.
    let inside = local.is_loopback() || remote.is_loopback() || local == remote;
    let over = matches!(state, LISTEN | TIME_WAIT | CLOSE);
    (!inside && !over).then_some(Connection { inode, state })
}

/// `0100007F:1F90`: words of 32 bits in the machine's own order.
fn address(text: &str) -> Option<IpAddr> {
    let (address, _) = text.split_once(':')?;
    let word = |place: usize| {
        let digits = address.get(place * 8..place * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    match address.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(word(0)?))),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let octets: [u8; 16] = words.concat().try_into().ok()?;
            Some(Ipv6Addr::from(octets).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    const HEADER: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

    #[test]
    fn only_connections_with_another_machine_count() {
        let line = |local: &str, remote: &str, state: u8, inode: u64| {
            format!(
                "   0: {local} {remote} {state:02X} 00000000:00000000 00:00000000 00000000  1000        0 {inode} 1 x\n"
            )
        };
        let own = "0F02000A:1F90";
        let other = "08080808:01BB";
        let v6 = |last: &str| format!("0000000000000000FFFF0000{last}:0050");
        let table = [
            HEADER.to_owned(),
            line("0100007F:1F90", "0100007F:C001", ESTABLISHED, 1),
            line(own, own, ESTABLISHED, 2),
            line("00000000:1F90", "00000000:0000", LISTEN, 3),
            line(own, other, ESTABLISHED, 4),
            line(own, other, TIME_WAIT, 5),
            line(own, other, 8, 6),
            line(&v6("0100007F"), &v6("0100007F"), ESTABLISHED, 7),
            line(&v6("0F02000A"), &v6("08080808"), ESTABLISHED, 8),
            "garbage\n".to_owned(),
        ];
        let inodes: Vec<u64> = parse(&table.concat()).iter().map(|it| it.inode).collect();
        assert_eq!(inodes, [4, 6, 8]);
    }

    #[test]
    fn a_socket_of_a_process_is_found_and_ended_while_others_live_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ends = [0, 1].map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let mut accepted = [0, 1].map(|_| listener.accept().unwrap().0);
        let descriptor = ends[0].as_raw_fd();
        let own = std::process::id();
        assert!(sockets(own).iter().any(|(number, _)| *number == descriptor));
        end(own, descriptor).unwrap();
        assert!(ends[0].read(&mut [0]).is_err());
        // Nobody on the other side hears of it.
        accepted[0].set_nonblocking(true).unwrap();
        assert_eq!(accepted[0].read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        std::io::Write::write_all(&mut accepted[1], b"x").unwrap();
        ends[1].read_exact(&mut [0]).unwrap();
    }
}
