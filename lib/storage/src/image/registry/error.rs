//! Why a registry did not give an image.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::retry::Failure;
use super::{credentials, endpoint};
use crate::blob;
use crate::blob::digest::Digest;
use crate::image::manifest;
use crate::image::reference::Reference;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Host(#[from] endpoint::BadHost),
    #[error(transparent)]
    Credentials(#[from] credentials::Error),
    #[error(transparent)]
    Blob(#[from] blob::Error),
    #[error("cannot read the certificate authorities in {path}")]
    Authorities {
        path: PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("a certificate authority of {path} cannot be used")]
    Authority {
        path: PathBuf,
        #[source]
        source: rustls::Error,
    },
    #[error("cannot set up TLS")]
    Tls(#[source] rustls::Error),
    #[error("cannot set up the HTTP client")]
    Client(#[source] reqwest::Error),
    #[error("cannot start the threads of a pull")]
    Runtime(#[source] io::Error),
    #[error("{0:?} is not an address")]
    Address(String),
    #[error("cannot reach {host}; check the name, the network and HTTPS_PROXY")]
    Unreachable {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error(
        "{host} does not speak TLS; if it is meant to be asked over plain HTTP, name it as insecure in the settings"
    )]
    NotTls {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error(
        "the certificate of {host} is not trusted; add its authority to the system's, or to the settings"
    )]
    Certificate {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error(
        "{host} does not accept the certificate of this machine, or none of the versions of TLS that it speaks"
    )]
    NotAccepted {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("the connection to {host} was cut")]
    Cut {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{host} said nothing for {} s", .after.as_secs_f64())]
    Silent { host: String, after: Duration },
    #[error("{host} sent blob {blob} too slowly: not complete after {} s", .after.as_secs())]
    Slow { host: String, blob: Digest, after: Duration },
    #[error("{host} continued blob {blob} at another place than it was asked for")]
    Range { host: String, blob: Digest },
    #[error("{host} answered {code}{}{}", detail(.message), advice(*.code))]
    Status { host: String, code: u16, message: String, retry_after: Option<Duration> },
    #[error(
        "{host} does not let you pull {repository}: log in (docker login {host}), or check the name; a private image and a missing one look alike"
    )]
    Unauthorized { host: String, repository: String },
    #[error("{host} does not let you push to {repository}: log in (docker login {host}), or check the name")]
    MayNotPush { host: String, repository: String },
    #[error("{host} did not say where to send a blob")]
    NoUpload { host: String },
    #[error("there is no image {reference}; check its name and tag")]
    NotFound { reference: Reference },
    #[error(
        "{host} redirects to {to}, which is not allowed: plain HTTP is only for hosts that the settings name as insecure"
    )]
    Redirect { host: String, to: String },
    #[error("{host} redirects in circles")]
    Redirects { host: String },
    #[error(
        "{host} wants its tokens fetched from {realm}, which is not allowed: plain HTTP is only for hosts that the settings name as insecure"
    )]
    Realm { host: String, realm: String },
    #[error("the token server at {host} did not answer with a token")]
    Token { host: String },
    #[error("{host} sent more than {limit} bytes where a small document belongs")]
    TooLarge { host: String, limit: u64 },
    #[error(
        "{host} sent a manifest of {reference} with digest {found}, promised was {expected}; it was thrown away"
    )]
    WrongManifest { host: String, reference: Box<Reference>, expected: Digest, found: Digest },
    #[error("{reference} cannot be used")]
    Manifest {
        reference: Reference,
        #[source]
        source: Box<manifest::Error>,
    },
}

fn detail(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

fn advice(code: u16) -> &'static str {
    match code {
        429 => "; it limits how often images are pulled: wait, log in (docker login), or use a mirror",
        500.. => "; the fault is there, try again later",
        _ => "",
    }
}

impl Error {
    /// What the error means for trying again.
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Unreachable { .. } | Self::Cut { .. } | Self::Silent { .. } | Self::Range { .. } => {
                Failure::Connection
            }
            Self::Blob(blob::Error::Truncated { .. }) => Failure::Connection,
            Self::Status { code, retry_after, .. } => {
                Failure::Status { code: *code, retry_after: *retry_after }
            }
            Self::Host(_)
            | Self::Credentials(_)
            | Self::Blob(_)
            | Self::Authorities { .. }
            | Self::Authority { .. }
            | Self::Tls(_)
            | Self::Client(_)
            | Self::Runtime(_)
            | Self::Address(_)
            | Self::NotTls { .. }
            | Self::Certificate { .. }
            | Self::NotAccepted { .. }
            | Self::Slow { .. }
            | Self::Unauthorized { .. }
            | Self::MayNotPush { .. }
            | Self::NoUpload { .. }
            | Self::NotFound { .. }
            | Self::Redirect { .. }
            | Self::Redirects { .. }
            | Self::Realm { .. }
            | Self::Token { .. }
            | Self::TooLarge { .. }
            | Self::WrongManifest { .. }
            | Self::Manifest { .. } => Failure::Final,
        }
    }

    /// Whether the fault is on this machine, so that another server would not help.
    pub(super) fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Blob(blob::Error::DiskFull { .. } | blob::Error::Write { .. } | blob::Error::Read { .. })
        )
    }
}
