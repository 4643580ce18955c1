//! A registry with images in it, stores that ask it, and what they are seen to do.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use imp_storage::image::reference::Reference;
use imp_storage::image::registry::settings::RegistrySettings;
use imp_storage::progress::{Event, Progress};
use imp_storage::store::{Store, StoreOptions};
use imp_testkit::oci::{Compression, Image, Layer};
use imp_testkit::registry::{FaultProxy, Reaction, Registry, Request};

/// Bytes of the file in the large layer; they do not compress.
pub(crate) const LARGE: usize = 3 << 20;

pub(crate) struct Fixture {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) registry: Registry,
}

impl Fixture {
    /// A registry that has `app:1`, an image of a small and a large layer, for this machine's platform.
    pub(crate) fn new() -> Self {
        Self::with(Registry::start().unwrap())
    }

    /// The same over TLS.
    pub(crate) fn over_tls() -> Self {
        Self::with(Registry::start_with_tls().unwrap())
    }

    fn with(registry: Registry) -> Self {
        let fixture = Self { folder: tempfile::tempdir().unwrap(), registry };
        app("linux", &host_architecture()).write_layout(&fixture.layout(), "1").unwrap();
        fixture.push("1");
        fixture
    }

    pub(crate) fn layout(&self) -> PathBuf {
        self.folder.path().join("layout")
    }

    pub(crate) fn push(&self, tag: &str) {
        self.registry.push(&self.layout(), tag, "app").unwrap();
    }

    pub(crate) fn proxy(&self, react: impl Fn(&Request) -> Reaction + Send + Sync + 'static) -> FaultProxy {
        FaultProxy::start(self.registry.address(), react).unwrap()
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    pub(crate) fn store(&self, insecure: &[&str]) -> Store {
        Store::open(self.root(), options(insecure)).unwrap()
    }
}

pub(crate) fn app(os: &str, architecture: &str) -> Image {
    let small = Layer::new()
        .directory("etc", 0o755)
        .file("etc/motd", 0o644, b"hello\n")
        .compressed(Compression::Gzip);
    let large = Layer::new().file("large", 0o600, &noise(LARGE));
    Image::new().platform(os, architecture).layer(small).layer(large).entrypoint(&["/app"]).env("A=1")
}

/// Bytes that do not compress, the same ones every time.
pub(crate) fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(count).collect()
}

pub(crate) fn host_architecture() -> String {
    imp_storage::image::platform::Platform::host().architecture
}

/// Settings with short pauses, so that tests of retries are quick.
pub(crate) fn options(insecure: &[&str]) -> StoreOptions {
    let registries = RegistrySettings {
        insecure: insecure.iter().map(|host| (*host).to_owned()).collect(),
        first_pause: Duration::from_millis(1),
        idle_timeout: Duration::from_secs(20),
        ..RegistrySettings::default()
    };
    StoreOptions { registries, ..StoreOptions::default() }
}

pub(crate) fn reference(host: &str, name: &str) -> Reference {
    format!("{host}/{name}").parse().unwrap()
}

/// Remembers all events.
#[derive(Default)]
pub(crate) struct Recorder(Mutex<Vec<Event>>);

impl Recorder {
    pub(crate) fn count(&self, is_counted: impl Fn(&Event) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|event| is_counted(event)).count()
    }

    pub(crate) fn retries(&self) -> usize {
        self.count(|event| matches!(event, Event::Retrying { .. }))
    }
}

impl Progress for Recorder {
    fn report(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

/// Files that only an operation under way may have.
pub(crate) fn leftovers(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for directory in ["partial", "leases", "disks"] {
        let entries = fs::read_dir(root.join(directory)).unwrap().map(|entry| entry.unwrap().path());
        found.extend(entries.filter(|path| path.extension().is_none_or(|extension| extension != "ext4")));
    }
    found
}

/// Requests for blobs that were answered from the registry, by path.
pub(crate) fn blob_requests(proxy: &FaultProxy) -> Vec<String> {
    let mut paths: Vec<String> =
        proxy.requests().into_iter().filter(Request::is_blob).map(|request| request.path).collect();
    paths.sort();
    paths
}

pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
