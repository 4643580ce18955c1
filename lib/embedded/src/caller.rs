//! Who is at the other end of a socket.

use tokio::net::UnixStream;

/// Whether the other end is a process of the user whose VMs these are.
pub(crate) fn is_user(client: &UnixStream) -> bool {
    match client.peer_cred() {
        Ok(peer) if peer.uid() == rustix::process::geteuid().as_raw() => true,
        Ok(peer) => {
            tracing::warn!(uid = peer.uid(), "a stranger connected");
            false
        }
        Err(error) => {
            tracing::warn!(%error, "a client without credentials");
            false
        }
    }
}
