//! The OCI image configuration: how an image wants to be run, parsed once and bounded.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize};

use super::platform::Platform;
use crate::blob::digest::Digest;

/// Largest configuration that is read, bytes.
pub const LARGEST: u64 = 8 << 20;
/// Most layers of an image.
pub const MOST_LAYERS: usize = 512;

/// What an image says about itself. Fields that an image leaves out are empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageConfig {
    pub platform: Platform,
    /// When it was built, RFC 3339, as the image says.
    pub created: Option<String>,
    pub author: Option<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    /// `NAME=value` lines in the image's order.
    pub env: Vec<String>,
    /// `user`, `uid`, `user:group`, `uid:gid`; empty is root.
    pub user: String,
    /// Empty is `/`.
    pub working_dir: String,
    /// A name or a number; empty is SIGTERM.
    pub stop_signal: String,
    /// `port/protocol`.
    pub exposed_ports: BTreeSet<String>,
    pub volumes: BTreeSet<String>,
    pub labels: BTreeMap<String, String>,
    /// Digests of the uncompressed layers, lowest first.
    pub diff_ids: Vec<Digest>,
    pub history: Vec<HistoryEntry>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HistoryEntry {
    #[serde(deserialize_with = "null_is_default")]
    pub created: String,
    #[serde(deserialize_with = "null_is_default")]
    pub created_by: String,
    #[serde(deserialize_with = "null_is_default")]
    pub comment: String,
    #[serde(deserialize_with = "null_is_default")]
    pub empty_layer: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the image configuration is not valid JSON of the OCI form")]
    Json(#[source] serde_json::Error),
    #[error("the image configuration has {0} bytes, more than the {LARGEST} allowed")]
    TooLarge(u64),
    #[error("the image has {0} layers, more than the {MOST_LAYERS} allowed")]
    Layers(usize),
    #[error("the layers of the image are of type {0:?}, expected \"layers\"")]
    LayersType(String),
}

impl ImageConfig {
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let length = bytes.len() as u64;
        if length > LARGEST {
            return Err(Error::TooLarge(length));
        }
        let document: Document = serde_json::from_slice(bytes).map_err(Error::Json)?;
        if !matches!(document.rootfs.kind.as_str(), "" | "layers") {
            return Err(Error::LayersType(document.rootfs.kind));
        }
        if document.rootfs.diff_ids.len() > MOST_LAYERS {
            return Err(Error::Layers(document.rootfs.diff_ids.len()));
        }
        let platform = Platform {
            os: if document.os.is_empty() { "linux".into() } else { document.os },
            architecture: document.architecture,
            variant: Some(document.variant),
        };
        let run = document.config;
        Ok(Self {
            platform: platform.normal(),
            created: document.created,
            author: document.author,
            entrypoint: run.entrypoint,
            cmd: run.cmd,
            env: run.env,
            user: run.user,
            working_dir: run.working_dir,
            stop_signal: run.stop_signal,
            exposed_ports: run.exposed_ports.into_keys().collect(),
            volumes: run.volumes.into_keys().collect(),
            labels: run.labels,
            diff_ids: document.rootfs.diff_ids,
            history: document.history,
        })
    }
}

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    created: Option<String>,
    #[serde(default)]
    author: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    architecture: String,
    #[serde(default, deserialize_with = "null_is_default")]
    os: String,
    #[serde(default, deserialize_with = "null_is_default")]
    variant: String,
    #[serde(default, deserialize_with = "null_is_default")]
    config: RunDocument,
    rootfs: RootfsDocument,
    #[serde(default, deserialize_with = "null_is_default")]
    history: Vec<HistoryEntry>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunDocument {
    #[serde(deserialize_with = "null_is_default")]
    entrypoint: Vec<String>,
    #[serde(deserialize_with = "null_is_default")]
    cmd: Vec<String>,
    #[serde(deserialize_with = "null_is_default")]
    env: Vec<String>,
    #[serde(deserialize_with = "null_is_default")]
    user: String,
    #[serde(deserialize_with = "null_is_default")]
    working_dir: String,
    #[serde(deserialize_with = "null_is_default")]
    stop_signal: String,
    #[serde(deserialize_with = "null_is_default")]
    exposed_ports: BTreeMap<String, serde::de::IgnoredAny>,
    #[serde(deserialize_with = "null_is_default")]
    volumes: BTreeMap<String, serde::de::IgnoredAny>,
    #[serde(deserialize_with = "null_is_default")]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RootfsDocument {
    #[serde(default, rename = "type", deserialize_with = "null_is_default")]
    kind: String,
    #[serde(default, deserialize_with = "null_is_default")]
    diff_ids: Vec<Digest>,
}

/// Builders write `null` for what is empty.
pub(super) fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::image::hostile_json;

    #[test]
    fn what_builders_write_as_null_or_leave_out_is_empty() {
        let text = br#"{"architecture":"amd64","os":"linux","config":{"Cmd":null,"Entrypoint":null,"Env":null,"Labels":null,
            "ExposedPorts":null,"Volumes":{"/data":{}}},"rootfs":{"type":"layers","diff_ids":null},"history":null}"#;
        let config = ImageConfig::parse(text).unwrap();
        assert!(config.cmd.is_empty() && config.entrypoint.is_empty() && config.diff_ids.is_empty());
        assert_eq!(config.volumes, BTreeSet::from(["/data".to_owned()]));
        assert_eq!(config.platform.to_string(), "linux/amd64");
        let config = ImageConfig::parse(br#"{"rootfs":{"type":"layers","diff_ids":[]}}"#).unwrap();
        assert_eq!(config.user, "");
    }

    #[test]
    fn an_image_that_says_how_it_runs_is_read_literally() {
        let diff = Digest::of(b"layer");
        let config = ImageConfig::parse(whole().as_bytes()).unwrap();
        assert_eq!(config.entrypoint, ["/bin/$HOME", "a \"b\"\n"]);
        assert_eq!(
            (config.env.len(), config.user.as_str(), config.stop_signal.as_str()),
            (2, "65532:7", "SIGQUIT")
        );
        assert_eq!((config.diff_ids, config.history.len()), (vec![diff], 1));
        assert!(config.exposed_ports.contains("80/tcp"));
    }

    #[test]
    fn what_is_not_a_configuration_is_a_typed_error() {
        assert!(matches!(ImageConfig::parse(b"{}"), Err(Error::Json(_))));
        assert!(matches!(ImageConfig::parse(b"[]"), Err(Error::Json(_))));
        assert!(matches!(ImageConfig::parse(br#"{"rootfs":{"type":"zip"}}"#), Err(Error::LayersType(_))));
        let diff = format!("\"{}\"", Digest::of(b""));
        let many =
            format!(r#"{{"rootfs":{{"diff_ids":[{}]}}}}"#, vec![diff.as_str(); MOST_LAYERS + 1].join(","));
        assert!(matches!(ImageConfig::parse(many.as_bytes()), Err(Error::Layers(_))));
        let deep = "[".repeat(100_000);
        assert!(matches!(ImageConfig::parse(deep.as_bytes()), Err(Error::Json(_))));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = ImageConfig::parse(&bytes);
        }

        #[test]
        fn a_configuration_with_any_value_changed_is_parsed_within_bounds_or_refused(
            text in hostile_json::changed(&whole())
        ) {
            if let Ok(config) = ImageConfig::parse(text.as_bytes()) {
                prop_assert!(config.diff_ids.len() <= MOST_LAYERS);
                prop_assert_eq!(config.platform.clone().normal(), config.platform);
            }
        }
    }

    /// A configuration with every field.
    fn whole() -> String {
        let diff = Digest::of(b"layer");
        format!(
            r#"{{"architecture":"arm64","os":"linux","variant":"v8","created":"2024-01-02T03:04:05Z","author":"me",
            "config":{{"Entrypoint":["/bin/$HOME","a \"b\"\n"],"Cmd":["-c"],"Env":["A=1","A=2"],"User":"65532:7",
            "WorkingDir":"/w","StopSignal":"SIGQUIT","ExposedPorts":{{"80/tcp":{{}}}},"Labels":{{"k":"v"}}}},
            "rootfs":{{"type":"layers","diff_ids":["{diff}"]}},"history":[{{"created_by":"x","empty_layer":true}}]}}"#
        )
    }
}
