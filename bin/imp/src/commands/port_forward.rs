//! `imp port-forward`

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::str::FromStr;

use anyhow::Context as _;
use clap::Args;
use imp_protocol::causes::chain;
use imp_protocol::guest::PingRequest;
use imp_protocol::guest::machine_client::MachineClient;
use imp_runtime::forward;
use imp_runtime::status::State;
use tokio::net::TcpListener;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Lead ports of this machine to ports of a VM, as long as this command runs
#[derive(Debug, Args)]
pub(crate) struct PortForward {
    /// Name, id, or the beginning of an id
    vm: String,
    /// The port here and the one in the guest; `PORT` alone means the same port, `:GUEST-PORT` a free one here
    #[arg(required = true, value_name = "[LOCAL]:GUEST-PORT")]
    ports: Vec<Pair>,
    /// Address of this machine to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = Ipv4Addr::LOCALHOST.into())]
    address: IpAddr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    local: u16,
    guest: NonZeroU16,
}

#[derive(Debug, thiserror::Error)]
#[error("write LOCAL:GUEST-PORT, :GUEST-PORT or PORT, from 1 to 65535")]
struct NotAPair;

impl FromStr for Pair {
    type Err = NotAPair;

    fn from_str(text: &str) -> Result<Self, NotAPair> {
        let (local, guest) = text.split_once(':').unwrap_or((text, text));
        let guest = guest.parse().map_err(|_| NotAPair)?;
        let local = if local.is_empty() { 0 } else { local.parse().map_err(|_| NotAPair)? };
        Ok(Self { local, guest })
    }
}

impl PortForward {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        context.block_on(async {
            let owner = context.owner().await?;
            let vm = owner.inspect(&self.vm).await?;
            let connection = owner.guest(&vm.id);
            // Asked for something, so that a VM which cannot be reached says why before anything is promised.
            MachineClient::new(connection.clone()).ping(PingRequest::default()).await.map_err(|status| refused(&status))?;
            let mut listeners = tokio::task::JoinSet::new();
            for pair in self.ports {
                let address = SocketAddr::new(self.address, pair.local);
                let listener =
                    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
                output::print(&format!("{} -> {}:{}\n", listener.local_addr()?, self.vm, pair.guest))?;
                let guest = connection.clone();
                let failed = move |error: forward::Error| {
                    output::warn(&format!("port {}: {}", pair.guest, chain(&error)));
                };
                listeners.spawn(forward::accept(listener, pair.guest, move || Some(guest.clone()), failed));
            }
            tokio::select! {
                vm_ended = owner.wait(vm.id.as_str(), State::Stopped) => Err(match vm_ended {
                    Ok(vm) => anyhow::anyhow!("{} has stopped, and its ports with it", vm.name),
                    Err(error) => error.into(),
                }.into()),
                () = connection.closed() => Err(anyhow::anyhow!("the owner of the VMs has ended; run the command again").into()),
                _ = listeners.join_next() => Err(anyhow::anyhow!("cannot accept connections any more").into()),
            }
        })?
    }
}

fn refused(status: &tonic::Status) -> anyhow::Error {
    imp_embedded::client::Error::from(status.clone()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ports_are_written_as_for_kubectl() {
        let pair = |text: &str| text.parse::<Pair>().ok().map(|pair| (pair.local, pair.guest.get()));
        assert_eq!(pair("8080:80"), Some((8080, 80)));
        assert_eq!(pair("80"), Some((80, 80)));
        assert_eq!(pair(":80"), Some((0, 80)));
        for bad in ["", ":", "80:", "x:1", "1:0", "70000:1", "1:2:3"] {
            assert_eq!(pair(bad), None, "{bad}");
        }
    }
}
