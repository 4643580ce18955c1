//! TLS between peers: version 1.3 only, and each side shows a certificate of an authority that the other trusts.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::PeerName;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the certificates in {path}")]
    Certificates {
        path: PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("there is no certificate in {path}")]
    NoCertificate { path: PathBuf },
    #[error("cannot read the key in {path}")]
    Key {
        path: PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("an authority of {path} cannot be used")]
    Authority {
        path: PathBuf,
        #[source]
        source: rustls::Error,
    },
    #[error("the certificate and the key do not work together")]
    Identity(#[source] rustls::Error),
    #[error("the certificates of others cannot be checked")]
    Verifier(#[source] VerifierBuilderError),
    #[error("TLS 1.3 is not to be had")]
    Version(#[source] rustls::Error),
}

/// What a machine shows to its peers, and what it wants to see of them. The key is never shown in text.
#[derive(Clone)]
pub struct Credentials {
    chain: Vec<CertificateDer<'static>>,
    key: Arc<PrivateKeyDer<'static>>,
    authorities: Arc<RootCertStore>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads PEM files: this machine's certificate with those that lead to its authority, its key, and the authorities whose
    /// word counts for others. The machine's own authorities do not count.
    pub fn load(certificate: &Path, key: &Path, authorities: &Path) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        for authority in certificates(authorities)? {
            let added = roots.add(authority);
            added.map_err(|source| Error::Authority { path: authorities.to_owned(), source })?;
        }
        let private = PrivateKeyDer::from_pem_file(key);
        let private = private.map_err(|source| Error::Key { path: key.to_owned(), source })?;
        Ok(Self { chain: certificates(certificate)?, key: Arc::new(private), authorities: Arc::new(roots) })
    }

    pub(super) fn client(&self) -> Result<ClientConfig, Error> {
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13]).map_err(Error::Version)?;
        builder
            .with_root_certificates(Arc::clone(&self.authorities))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(Error::Identity)
    }

    pub(super) fn server(&self) -> Result<ServerConfig, Error> {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&self.authorities), provider());
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13]).map_err(Error::Version)?;
        builder
            .with_client_cert_verifier(verifier.build().map_err(Error::Verifier)?)
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(Error::Identity)
    }
}

/// Whether a certificate, which an authority has vouched for, has one of these names.
pub(super) fn has_name(certificate: &CertificateDer<'_>, names: &[PeerName]) -> bool {
    let Ok(parsed) = ParsedCertificate::try_from(certificate) else { return false };
    names.iter().any(|name| verify_server_name(&parsed, name.server_name()).is_ok())
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let failed = |source| Error::Certificates { path: path.to_owned(), source };
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(failed)?.collect();
    let found = found.map_err(failed)?;
    if found.is_empty() { Err(Error::NoCertificate { path: path.to_owned() }) } else { Ok(found) }
}
