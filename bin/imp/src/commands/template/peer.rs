//! The flags of a machine that gets templates from another one, or gives them.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use imp_storage::snapshots::peer::tls::{self, Credentials};
use imp_storage::snapshots::peer::{Peer, PeerName};

/// What a machine shows to others, and whom it believes.
#[derive(Debug, Clone, Args)]
pub(super) struct Certificates {
    /// This machine's certificate, PEM, with those that lead to its authority
    #[arg(long, value_name = "FILE")]
    certificate: PathBuf,
    /// The key of the certificate, PEM
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// The authorities whose certificates count, PEM; this machine's own do not
    #[arg(long, value_name = "FILE")]
    authorities: PathBuf,
}

impl Certificates {
    pub(super) fn load(&self) -> Result<Credentials, tls::Error> {
        Credentials::load(&self.certificate, &self.key, &self.authorities)
    }
}

/// What a peer is shown, and must show.
const SHOWN: [&str; 3] = ["certificate", "key", "authorities"];

/// The machine that a template is taken from; none: a registry.
#[derive(Debug, Clone, Args)]
pub(super) struct From {
    /// The machine that serves templates (`imp template serve`), instead of a registry
    #[arg(long, value_name = "HOST:PORT", requires_all = SHOWN)]
    peer: Option<String>,
    /// The DNS name that its certificate must have [default: HOST]
    #[arg(long, value_name = "NAME", requires = "peer")]
    peer_name: Option<PeerName>,
    /// This machine's certificate, PEM, with those that lead to its authority
    #[arg(long, value_name = "FILE", requires = "peer")]
    certificate: Option<PathBuf>,
    /// The key of the certificate, PEM
    #[arg(long, value_name = "FILE", requires = "peer")]
    key: Option<PathBuf>,
    /// The authorities whose certificates count, PEM; this machine's own do not
    #[arg(long, value_name = "FILE", requires = "peer")]
    authorities: Option<PathBuf>,
}

impl From {
    pub(super) fn peer(&self) -> anyhow::Result<Option<Peer>> {
        let Self { peer: Some(text), certificate, key, authorities, .. } = self else { return Ok(None) };
        let (Some(certificate), Some(key), Some(authorities)) = (certificate, key, authorities) else {
            bail!("a peer wants to see a certificate: --certificate, --key, --authorities");
        };
        let (host, _) = text.rsplit_once(':').context("write --peer HOST:PORT")?;
        let name = match &self.peer_name {
            Some(name) => name.clone(),
            None => named(host)?,
        };
        let address = resolve(text)?;
        Ok(Some(Peer { address, name, credentials: Credentials::load(certificate, key, authorities)? }))
    }
}

fn named(host: &str) -> anyhow::Result<PeerName> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if bare.parse::<IpAddr>().is_ok() {
        bail!("{host} is an address: say with --peer-name which name the certificate of that machine has");
    }
    Ok(host.parse()?)
}

fn resolve(text: &str) -> anyhow::Result<SocketAddr> {
    let mut found = text.to_socket_addrs().with_context(|| format!("the peer {text} cannot be found"))?;
    found.next().with_context(|| format!("the peer {text} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_no_name_of_a_certificate() {
        assert_eq!(named("node-1.example").unwrap().as_str(), "node-1.example");
        for address in ["127.0.0.1", "[::1]"] {
            assert!(named(address).unwrap_err().to_string().contains("--peer-name"), "{address}");
        }
    }
}
