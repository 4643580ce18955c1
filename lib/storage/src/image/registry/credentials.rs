//! Who to be at a registry: Docker's configuration file and its credential helpers.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Largest configuration file and largest answer of a helper, bytes.
const LARGEST: u64 = 1 << 20;
/// How long a helper may take: it may ask its user for a passphrase.
const HELPER_DEADLINE: Duration = Duration::from_secs(60);
/// The user name by which a helper says that the secret is an identity token.
const TOKEN_USER: &str = "<token>";

/// A secret that no log and no error shows.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct Secret(String);

impl Secret {
    pub(super) fn new(secret: String) -> Self {
        Self(secret)
    }

    pub(super) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Credentials {
    Anonymous,
    Password {
        user: String,
        password: Secret,
    },
    /// What a login at the token server left: exchanged there for tokens.
    Identity(Secret),
    /// Sent to the registry as it is.
    RegistryToken(Secret),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the credentials in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is not a Docker configuration file")]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{path} is larger than {LARGEST} bytes")]
    TooLarge { path: PathBuf },
    #[error(
        "{path}: the entry for {host} is not base64 of USER:PASSWORD; log in again (docker login {host})"
    )]
    Entry { path: PathBuf, host: String },
    #[error("{0:?} is not the name of a credential helper")]
    HelperName(String),
    #[error(
        "cannot run the credential helper {helper}; install it or remove it from the Docker configuration"
    )]
    HelperStart {
        helper: String,
        #[source]
        source: io::Error,
    },
    #[error("the credential helper {helper} failed for {host}; log in again (docker login {host})")]
    HelperFailed { helper: String, host: String },
    #[error("the credential helper {helper} did not answer within {} s", HELPER_DEADLINE.as_secs())]
    HelperSilent { helper: String },
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ConfigFile {
    auths: BTreeMap<String, Entry>,
    creds_store: Option<String>,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase", default)]
struct Entry {
    auth: Option<Secret>,
    username: Option<String>,
    password: Option<Secret>,
    identitytoken: Option<Secret>,
    registrytoken: Option<Secret>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: Secret,
}

/// Finds the credentials for a registry. No file, and no entry in it, means anonymous.
pub(super) async fn find(config: Option<&Path>, key: &str) -> Result<Credentials, Error> {
    let Some(path) = config else { return Ok(Credentials::Anonymous) };
    let Some(file) = read(path)? else { return Ok(Credentials::Anonymous) };
    let host = host_of(key);
    let helper = file.cred_helpers.iter().find(|(name, _)| host_of(name) == host).map(|(_, helper)| helper);
    if let Some(helper) = helper.or(file.creds_store.as_ref()).filter(|helper| !helper.is_empty()) {
        let found = ask_helper(helper, key).await?;
        if found != Credentials::Anonymous {
            return Ok(found);
        }
    }
    let exact = file.auths.get(key);
    let entry =
        exact.or_else(|| file.auths.iter().find(|(name, _)| host_of(name) == host).map(|(_, entry)| entry));
    let Some(entry) = entry else { return Ok(Credentials::Anonymous) };
    from_entry(entry).ok_or_else(|| Error::Entry { path: path.to_owned(), host: host.to_owned() })
}

fn read(path: &Path) -> Result<Option<ConfigFile>, Error> {
    let bytes = match std::fs::File::open(path) {
        Ok(file) => {
            let mut bytes = Vec::new();
            let read = io::Read::read_to_end(&mut io::Read::take(file, LARGEST + 1), &mut bytes);
            read.map_err(|source| Error::Read { path: path.to_owned(), source })?;
            bytes
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(source) => return Err(Error::Read { path: path.to_owned(), source }),
    };
    if bytes.len() as u64 > LARGEST {
        return Err(Error::TooLarge { path: path.to_owned() });
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|source| Error::Json { path: path.to_owned(), source })
}

/// Keys are hosts, or addresses as old clients wrote them.
fn host_of(key: &str) -> &str {
    let bare = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    bare.split('/').next().unwrap_or(bare)
}

fn from_entry(entry: &Entry) -> Option<Credentials> {
    let filled = |secret: &Option<Secret>| secret.clone().filter(|secret| !secret.expose().is_empty());
    if let Some(token) = filled(&entry.identitytoken) {
        return Some(Credentials::Identity(token));
    }
    if let Some(token) = filled(&entry.registrytoken) {
        return Some(Credentials::RegistryToken(token));
    }
    if let Some(auth) = filled(&entry.auth) {
        let text = String::from_utf8(STANDARD.decode(auth.expose().trim()).ok()?).ok()?;
        let (user, password) = text.split_once(':')?;
        let password = Secret::new(password.trim_end_matches('\0').to_owned());
        return Some(Credentials::Password { user: user.to_owned(), password });
    }
    match (&entry.username, filled(&entry.password)) {
        (Some(user), Some(password)) if !user.is_empty() => {
            Some(Credentials::Password { user: user.clone(), password })
        }
        _ => Some(Credentials::Anonymous),
    }
}

async fn ask_helper(name: &str, key: &str) -> Result<Credentials, Error> {
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')) {
        return Err(Error::HelperName(name.to_owned()));
    }
    let helper = format!("docker-credential-{name}");
    let start = |source| Error::HelperStart { helper: helper.clone(), source };
    let mut child = tokio::process::Command::new(&helper)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let conversation = async {
        if let Some(mut stdin) = stdin {
            // A helper that answers without reading closes the pipe; its answer counts.
            let _ = stdin.write_all(format!("{key}\n").as_bytes()).await;
        }
        let mut answer = Vec::new();
        if let Some(stdout) = stdout {
            stdout.take(LARGEST).read_to_end(&mut answer).await?;
        }
        Ok((answer, child.wait().await?))
    };
    let finished = tokio::time::timeout(HELPER_DEADLINE, conversation).await;
    let (answer, status) =
        finished.map_err(|_| Error::HelperSilent { helper: helper.clone() })?.map_err(start)?;
    let failed = || Error::HelperFailed { helper: helper.clone(), host: host_of(key).to_owned() };
    if !status.success() {
        // The helpers' protocol has no other sign for this than its text.
        let said = String::from_utf8_lossy(&answer).to_ascii_lowercase();
        return if said.contains("not found") { Ok(Credentials::Anonymous) } else { Err(failed()) };
    }
    let answer: HelperAnswer = serde_json::from_slice(&answer).map_err(|_| failed())?;
    Ok(match answer.username.as_str() {
        TOKEN_USER => Credentials::Identity(answer.secret),
        "" => Credentials::Anonymous,
        user => Credentials::Password { user: user.to_owned(), password: answer.secret },
    })
}

#[cfg(test)]
#[path = "credentials_tests.rs"]
mod tests;
