//! HTTP as registries need it: trusted certificates, redirects that never carry credentials away, and bounded answers.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{ClientBuilder, Method, RequestBuilder, Response, StatusCode, Url};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use super::credentials::Secret;
use super::endpoint::is_allowed;
use super::error::Error;
use super::retry::retry_after;
use super::settings::RegistrySettings;

const MOST_REDIRECTS: usize = 10;
/// Longest body of an error that is read, bytes.
const LONGEST_REFUSAL: u64 = 8 << 10;
/// A small document may take this many silences' time in all.
const DOCUMENT_SILENCES: u32 = 4;
/// An upload that is slower than this, in bytes per second, is given up.
const SLOWEST_UPLOAD: u64 = 16 << 10;

/// Sends requests and follows redirects.
pub(crate) struct Transport {
    client: reqwest::Client,
    settings: RegistrySettings,
}

/// A request for a document or a blob.
#[derive(Default)]
pub(crate) struct Get<'a> {
    pub(super) accept: Option<&'a str>,
    /// Bytes to leave out at the start.
    pub(super) from: u64,
    /// Goes to the host that is asked and to no other.
    pub(super) authorization: Option<&'a Secret>,
}

/// A request that is no question for content.
#[derive(Clone)]
pub(super) struct Send<'a> {
    pub(super) method: Method,
    pub(super) content_type: Option<&'a str>,
    /// Sent anew at each try; clones share it.
    pub(super) body: Bytes,
}

/// An answer, and whether it is the asked host's own.
pub(crate) struct Answer {
    pub(crate) response: Response,
    pub(crate) redirected: bool,
}

impl Transport {
    pub(super) fn new(settings: &RegistrySettings) -> Result<Self, Error> {
        let client = builder(settings).tls_backend_preconfigured(tls(&settings.certificate_authorities)?);
        Ok(Self { client: client.build().map_err(Error::Client)?, settings: settings.clone() })
    }

    /// To one machine only, which has the certificate of `name` and is at `address`. No proxy comes between.
    pub(crate) fn to_peer(
        settings: &RegistrySettings,
        tls: rustls::ClientConfig,
        name: &str,
        address: SocketAddr,
    ) -> Result<Self, Error> {
        let client = builder(settings).no_proxy().resolve(name, address).tls_backend_preconfigured(tls);
        Ok(Self { client: client.build().map_err(Error::Client)?, settings: settings.clone() })
    }

    pub(crate) fn settings(&self) -> &RegistrySettings {
        &self.settings
    }

    /// Asks for `url`, through redirects. The answer may have any status but a redirect's.
    pub(crate) async fn get(&self, url: Url, get: &Get<'_>) -> Result<Answer, Error> {
        let asked = host(&url);
        let origin = url.origin();
        let mut url = url;
        let mut authorization = get.authorization;
        for hop in 0..=MOST_REDIRECTS {
            let mut request = self.client.get(url.clone());
            if let Some(accept) = get.accept {
                request = request.header(ACCEPT, accept);
            }
            if get.from > 0 {
                request = request.header(RANGE, format!("bytes={}-", get.from));
            }
            if let Some(secret) = authorization {
                request = request.header(AUTHORIZATION, secret.expose());
            }
            let response = self.send(request, &host(&url)).await?;
            let Some(next) = redirect(&url, &response) else {
                return Ok(Answer { response, redirected: hop > 0 });
            };
            let next = next.map_err(|to| Error::Redirect { host: asked.clone(), to })?;
            if !is_allowed(&next, &self.settings) {
                return Err(Error::Redirect { host: asked, to: host_with_scheme(&next) });
            }
            if next.origin() != origin {
                authorization = None;
            }
            url = next;
        }
        Err(Error::Redirects { host: asked })
    }

    /// Sends a request once. The answer may have any status.
    pub(super) async fn send_to(
        &self,
        url: Url,
        what: &Send<'_>,
        authorization: Option<&Secret>,
    ) -> Result<Response, Error> {
        let host = host(&url);
        let mut request = self.client.request(what.method.clone(), url).body(what.body.clone());
        if let Some(kind) = what.content_type {
            request = request.header(CONTENT_TYPE, kind);
        }
        if let Some(secret) = authorization {
            request = request.header(AUTHORIZATION, secret.expose());
        }
        // A large body takes its time to leave.
        let extra = Duration::from_secs(what.body.len() as u64 / SLOWEST_UPLOAD);
        self.send_within(request, &host, extra).await
    }

    /// Sends a form, as a token server wants it. Redirects are not followed: the form holds a secret.
    pub(super) async fn post_form(&self, url: Url, form: &[(&str, &str)]) -> Result<Response, Error> {
        let mut body = Url::parse("form:").map_err(|_| Error::Address(String::new()))?;
        body.query_pairs_mut().extend_pairs(form);
        let body = body.query().unwrap_or_default().to_owned();
        let host = host(&url);
        let kind = "application/x-www-form-urlencoded";
        let request = self.client.post(url).header(CONTENT_TYPE, kind).body(body);
        self.send(request, &host).await
    }

    async fn send(&self, request: RequestBuilder, host: &str) -> Result<Response, Error> {
        self.send_within(request, host, Duration::ZERO).await
    }

    async fn send_within(
        &self,
        request: RequestBuilder,
        host: &str,
        extra: Duration,
    ) -> Result<Response, Error> {
        let deadline = self.settings.connect_timeout + self.settings.idle_timeout + extra;
        let silent = |_| Error::Silent { host: host.to_owned(), after: deadline };
        tokio::time::timeout(deadline, request.send())
            .await
            .map_err(silent)?
            .map_err(|source| connection(host, source))
    }

    /// Reads a whole small document.
    pub(crate) async fn read(&self, mut response: Response, limit: u64) -> Result<Vec<u8>, Error> {
        let host = host(response.url());
        let too_large = || Error::TooLarge { host: host.clone(), limit };
        if response.content_length().is_some_and(|length| length > limit) {
            return Err(too_large());
        }
        let reading = async {
            let mut bytes = Vec::new();
            while let Some(chunk) = self.chunk(&mut response).await? {
                bytes.extend_from_slice(&chunk);
                if bytes.len() as u64 > limit {
                    return Err(too_large());
                }
            }
            Ok(bytes)
        };
        let deadline = self.settings.idle_timeout.saturating_mul(DOCUMENT_SILENCES);
        let silent = |_| Error::Silent { host: host.clone(), after: deadline };
        tokio::time::timeout(deadline, reading).await.map_err(silent)?
    }

    /// The next bytes of a body; None at its end.
    pub(super) async fn chunk(&self, response: &mut Response) -> Result<Option<Bytes>, Error> {
        let host = host(response.url());
        let after: Duration = self.settings.idle_timeout;
        match tokio::time::timeout(after, response.chunk()).await {
            Ok(Ok(chunk)) => Ok(chunk),
            Ok(Err(source)) => Err(Error::Cut { host, source }),
            Err(_) => Err(Error::Silent { host, after }),
        }
    }

    /// The error that a status other than success is, with what the server says about it.
    pub(crate) async fn refusal(&self, response: Response) -> Error {
        let (host, code) = (host(response.url()), response.status().as_u16());
        let retry_after = wish(response.headers(), SystemTime::now());
        let body = self.read(response, LONGEST_REFUSAL).await.unwrap_or_default();
        Error::Status { host, code, message: explanation(&body), retry_after }
    }
}

fn builder(settings: &RegistrySettings) -> ClientBuilder {
    reqwest::Client::builder()
        .user_agent(concat!("imp/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(settings.connect_timeout)
}

fn wish(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    retry_after(headers.get(RETRY_AFTER)?.to_str().ok()?, now)
}

/// The message in a registry's error document; printable, and short.
fn explanation(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Document {
        errors: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let Ok(document) = serde_json::from_slice::<Document>(body) else { return String::new() };
    let Some(first) = document.errors.first() else { return String::new() };
    let text = if first.message.is_empty() { &first.code } else { &first.message };
    text.chars().filter(|letter| !letter.is_control()).take(200).collect()
}

/// Where a redirect leads; an address that is none is returned as the error.
fn redirect(from: &Url, response: &Response) -> Option<Result<Url, String>> {
    let status = response.status();
    let is_redirect = matches!(
        status,
        StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT
    );
    let location = response.headers().get(LOCATION).filter(|_| is_redirect)?;
    let text = String::from_utf8_lossy(location.as_bytes());
    Some(from.join(&text).map_err(|_| text.chars().take(200).collect()))
}

/// Host and port, for messages.
pub(super) fn host(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}

/// Nothing of the path or the query: they may hold a signature.
fn host_with_scheme(url: &Url) -> String {
    format!("{}://{}", url.scheme(), host(url))
}

/// Sorts a failed request by what the user can do about it.
fn connection(host: &str, source: reqwest::Error) -> Error {
    let host = host.to_owned();
    match tls_error(&source) {
        Some(rustls::Error::InvalidCertificate(_)) => Error::Certificate { host, source },
        Some(rustls::Error::AlertReceived(_)) => Error::NotAccepted { host, source },
        Some(rustls::Error::InvalidMessage(_)) => Error::NotTls { host, source },
        _ if source.is_connect() || source.is_timeout() => Error::Unreachable { host, source },
        _ => Error::Cut { host, source },
    }
}

fn tls_error(error: &reqwest::Error) -> Option<&rustls::Error> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        cause = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

/// TLS with the machine's certificate authorities and those of the settings.
fn tls(files: &[impl AsRef<Path>]) -> Result<rustls::ClientConfig, Error> {
    let mut roots = rustls::RootCertStore::empty();
    // A damaged certificate among the machine's is no reason to distrust the others.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    for path in files.iter().map(AsRef::as_ref) {
        let authorities = |source| Error::Authorities { path: path.to_owned(), source };
        for certificate in CertificateDer::pem_file_iter(path).map_err(authorities)? {
            let added = roots.add(certificate.map_err(authorities)?);
            added.map_err(|source| Error::Authority { path: path.to_owned(), source })?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(builder.map_err(Error::Tls)?.with_root_certificates(roots).with_no_client_auth())
}
