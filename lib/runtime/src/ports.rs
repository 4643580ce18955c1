//! Published ports. One rule: where the VM has a bridge network the kernel leads connections to its address there, and a
//! port is only kept from others here; elsewhere this process carries them to the guest's loopback.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use imp_protocol::causes::chain;
use imp_protocol::connection::Connection;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::forward;
use crate::spec::PublishedPort;
use crate::status::PortFacts;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {address}: choose another port with -p, or end what uses it")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// A port that is nobody else's until this is dropped.
#[derive(Debug)]
pub(crate) struct Published {
    pub facts: PortFacts,
    _held: Held,
}

#[derive(Debug)]
enum Held {
    Listening { _task: AbortOnDropHandle<()> },
    Reserved { _socket: OwnedFd },
}

/// Keeps a port of the host that the kernel leads to the guest: no other program can bind it, and port 0 becomes a free
/// one. Nothing listens: what the kernel does not lead on is refused, as on a closed port.
pub(crate) fn reserve(port: PublishedPort) -> Result<Published, Error> {
    // A socket that would let others share the port reserves nothing. Only where connections of an earlier server have
    // yet to run out is there no other way.
    let socket = bind(port.host, Sharing::Never).or_else(|error| match error {
        Errno::ADDRINUSE => bind(port.host, Sharing::WithEndedConnections),
        error => Err(error),
    });
    let failed = |source: Errno| Error::Listen { address: port.host, source: source.into() };
    let socket = socket.map_err(failed)?;
    let bound = rustix::net::getsockname(&socket).map_err(failed)?;
    let host = SocketAddr::try_from(bound).map_err(failed)?;
    let facts = PortFacts { host, guest: port.guest.get() };
    Ok(Published { facts, _held: Held::Reserved { _socket: socket } })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    Never,
    WithEndedConnections,
}

fn bind(address: SocketAddr, sharing: Sharing) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    if sharing == Sharing::WithEndedConnections {
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// Listens on a port. Connections that come while there is no guest are closed.
pub(crate) async fn publish(
    port: PublishedPort,
    guest: watch::Receiver<Option<Connection>>,
) -> Result<Published, Error> {
    let failed = |source| Error::Listen { address: port.host, source };
    let listener = TcpListener::bind(port.host).await.map_err(failed)?;
    let host = listener.local_addr().map_err(failed)?;
    let port_of_guest = port.guest;
    let failed = move |error| {
        tracing::debug!(
            error = chain(&error),
            port = port_of_guest,
            "a connection to a published port ended early"
        );
    };
    let task = tokio::spawn(forward::accept(listener, port.guest, move || guest.borrow().clone(), failed));
    let facts = PortFacts { host, guest: port.guest.get() };
    Ok(Published { facts, _held: Held::Listening { _task: AbortOnDropHandle::new(task) } })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn a_port_that_is_taken_is_an_error_at_once_and_free_again_after_the_end() {
        let (_sender, guest) = watch::channel(None);
        let any = PublishedPort { host: "127.0.0.1:0".parse().unwrap(), guest: NonZeroU16::MIN };
        let published = publish(any, guest.clone()).await.unwrap();
        let same = PublishedPort { host: published.facts.host, ..any };
        assert!(matches!(publish(same, guest.clone()).await, Err(Error::Listen { .. })));
        drop(published);
        while publish(same, guest.clone()).await.is_err() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_connection_without_a_guest_is_closed() {
        let (_sender, guest) = watch::channel(None);
        let any = PublishedPort { host: "127.0.0.1:0".parse().unwrap(), guest: NonZeroU16::MIN };
        let published = publish(any, guest).await.unwrap();
        let mut stream = TcpStream::connect(published.facts.host).await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }

    fn port(host: &str) -> PublishedPort {
        PublishedPort { host: host.parse().unwrap(), guest: NonZeroU16::MIN }
    }

    #[tokio::test]
    async fn a_reserved_port_is_nobody_elses_and_answers_nobody() {
        let reserved = reserve(port("127.0.0.1:0")).unwrap();
        let address = reserved.facts.host;
        assert_ne!(address.port(), 0);
        assert!(matches!(reserve(port(&address.to_string())), Err(Error::Listen { .. })));
        // It asks for sharing, as servers do.
        assert!(std::net::TcpListener::bind(address).is_err());
        let refused = std::net::TcpStream::connect(address).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        drop(reserved);
        std::net::TcpListener::bind(address).unwrap();
    }

    #[test]
    fn connections_of_an_earlier_server_that_run_out_are_in_nobodys_way() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let client = std::net::TcpStream::connect(address).unwrap();
        // The server hangs up first: its end of the connection lingers.
        drop(server.accept().unwrap());
        drop((client, server));
        reserve(port(&address.to_string())).unwrap();
    }
}
