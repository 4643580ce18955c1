//! Snapshots from machine to machine, over TLS 1.3 in which both sides show a certificate.
//!
//! ```text
//! GET /v1/templates/<hex>                         the digest of the snapshot that a template's digest leads to
//! GET /v1/snapshots/<hex>/manifest                manifest.json
//! GET /v1/snapshots/<hex>/<part>/index            32 bytes for each chunk of memory, state or scratch
//! GET /v1/snapshots/<hex>/<part>/chunks/<number>  one chunk, compressed with zstd
//! ```
//!
//! 403: the certificate has none of the names that may ask. 404: there is no such snapshot, nothing pins it, or the chunk is
//! all zeros. 503: too many ask at once.

pub(super) mod client;
pub mod server;
pub mod tls;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use rustls::pki_types::ServerName;

/// The name in a certificate by which a machine is known: a DNS name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerName {
    text: String,
    name: ServerName<'static>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a name for a peer: expected a DNS name, such as node-1.example")]
pub struct BadName(String);

impl PeerName {
    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn server_name(&self) -> &ServerName<'static> {
        &self.name
    }
}

impl FromStr for PeerName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = || BadName(text.chars().take(100).collect());
        match ServerName::try_from(text.to_owned()) {
            Ok(name @ ServerName::DnsName(_)) => Ok(Self { text: text.to_owned(), name }),
            Ok(_) | Err(_) => Err(bad()),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A machine to get snapshots from.
#[derive(Debug, Clone)]
pub struct Peer {
    pub address: SocketAddr,
    /// The name that its certificate must have.
    pub name: PeerName,
    /// What this machine shows.
    pub credentials: tls::Credentials,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dns_names_are_names_of_peers() {
        assert_eq!("husk.default.example".parse::<PeerName>().unwrap().as_str(), "husk.default.example");
        for bad in ["", "10.0.0.1", "::1", "a b", "*", "a/b", "node:1"] {
            assert_eq!(bad.parse::<PeerName>(), Err(BadName(bad.into())), "{bad}");
        }
    }
}
