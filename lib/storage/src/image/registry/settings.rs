//! What a user says about registries: mirrors, plain HTTP, certificates, where credentials are, and how long to wait.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

/// Settings of all registries. The default asks every registry by its own name, over TLS only, without credentials.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RegistrySettings {
    /// Registry hosts, with their port if they have one, that are asked over plain HTTP. No host is on this list by itself,
    /// not even localhost: whoever can take a port on this machine could otherwise stand in for a registry.
    pub insecure: Vec<String>,
    /// For each registry domain, hosts that are asked first, in order. An answer of any of them is as good as the
    /// registry's own, because content is addressed by digest; a tag is whatever the first mirror that knows it says.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Files with further certificate authorities, PEM.
    pub certificate_authorities: Vec<PathBuf>,
    /// Docker's configuration file, for credentials; None means no credentials. See [`docker_config`].
    pub docker_config: Option<PathBuf>,
    /// Blobs that are downloaded at once.
    pub parallel_downloads: usize,
    /// How often a request that may pass later is tried in all.
    pub attempts: u32,
    /// Longest wait for a connection, seconds.
    #[serde(with = "seconds")]
    pub connect_timeout: Duration,
    /// Longest silence within an answer, seconds.
    #[serde(with = "seconds")]
    pub idle_timeout: Duration,
    /// Longest pause that a registry may ask for before the pull gives up, seconds.
    #[serde(with = "seconds")]
    pub longest_pause: Duration,
    /// Pause before the second try; it doubles from try to try, and a random part of it is taken.
    #[serde(with = "seconds")]
    pub first_pause: Duration,
}

impl Default for RegistrySettings {
    fn default() -> Self {
        Self {
            insecure: Vec::new(),
            mirrors: BTreeMap::new(),
            certificate_authorities: Vec::new(),
            docker_config: None,
            parallel_downloads: 3,
            attempts: 5,
            connect_timeout: Duration::from_secs(15),
            idle_timeout: Duration::from_secs(30),
            longest_pause: Duration::from_secs(120),
            first_pause: Duration::from_millis(500),
        }
    }
}

/// Where Docker's configuration file is: in `$DOCKER_CONFIG`, else in `.docker` of the home directory. Both are arguments
/// so that only a program's edge reads the environment.
pub fn docker_config(docker_config_dir: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    let directory = match docker_config_dir {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => home?.join(".docker"),
    };
    Some(directory.join("config.json"))
}

/// Durations as numbers of seconds, fractions allowed.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer};

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        Duration::try_from_secs_f64(seconds).map_err(serde::de::Error::custom)
    }
}
