//! What is set where: flags win over variables, variables over the settings file, the file over defaults.
//!
//! Everything is read here, once, and handed on as plain values. (Of paths, flags and variables arrive merged.)

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use imp_embedded::layout::Layout;
use imp_runtime::DriverChoice;
use imp_runtime::made_up;
use imp_runtime::spec::{BridgeSettings, Outside, Pool, PoolError};
use imp_storage::image::registry::settings::{RegistrySettings, docker_config};
use ipnet::{Ipv4Net, Ipv6Net};
use serde::Deserialize;

use crate::args::Global;

/// How long an owner without VMs and clients stays.
const IDLE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) layout: Layout,
    pub(crate) guest_agent: PathBuf,
    pub(crate) driver: DriverChoice,
    pub(crate) firecracker: Option<PathBuf>,
    pub(crate) qemu: Option<PathBuf>,
    pub(crate) registries: RegistrySettings,
    pub(crate) bridge: BridgeSettings,
    /// Bytes on disk above which the least recently used images go.
    pub(crate) image_size_limit: Option<u64>,
    pub(crate) owner_idle: Duration,
    pub(crate) run: RunDefaults,
}

/// What `imp run` takes when a flag does not say otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RunDefaults {
    pub(crate) memory: Option<String>,
    pub(crate) cpus: Option<String>,
    pub(crate) disk: Option<String>,
    pub(crate) network: Option<String>,
    pub(crate) kernel: Option<String>,
}

/// The settings file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    data_dir: Option<PathBuf>,
    runtime_dir: Option<PathBuf>,
    guest_agent: Option<PathBuf>,
    driver: Option<String>,
    firecracker: Option<PathBuf>,
    qemu: Option<PathBuf>,
    image_size_limit: Option<String>,
    owner_idle_seconds: Option<u64>,
    registries: RegistrySettings,
    network: NetworkSettings,
    run: RunDefaults,
}

/// Bridge networks of this machine's VMs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct NetworkSettings {
    /// Where the addresses come from by which this machine tells its VMs apart, as in 10.87.0.0/16.
    pool: Option<Ipv4Net>,
    /// The same for IPv6, as in fd12:3456:789a::/64.
    pool6: Option<Ipv6Net>,
    /// VMs are seen under these addresses outside: somebody routes them to this machine.
    routed: bool,
}

impl NetworkSettings {
    fn bridge(self) -> Result<BridgeSettings, Error> {
        let pool = match self.pool {
            None => None,
            Some(pool) => Some(Pool::new(pool, self.pool6).map_err(Error::Pool)?),
        };
        Ok(BridgeSettings { pool, outside: if self.routed { Outside::Routed } else { Outside::Masquerade } })
    }
}

/// What the machine says: the part of the world that settings depend on.
#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) is_root: bool,
    /// Path of this program.
    pub(crate) program: PathBuf,
    pub(crate) home: Option<PathBuf>,
    pub(crate) xdg_data_home: Option<PathBuf>,
    pub(crate) xdg_config_home: Option<PathBuf>,
    pub(crate) xdg_runtime_dir: Option<PathBuf>,
    pub(crate) docker_config: Option<PathBuf>,
    /// From IMP_OWNER_IDLE_SECONDS.
    pub(crate) owner_idle_seconds: Option<String>,
    /// From IMP_INSECURE_REGISTRIES: hosts, with commas between.
    pub(crate) insecure_registries: Option<String>,
}

impl World {
    pub(crate) fn look() -> io::Result<Self> {
        let path = |name: &str| {
            std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from)
        };
        Ok(Self {
            is_root: rustix::process::geteuid().is_root(),
            program: std::env::current_exe()?,
            home: path("HOME"),
            xdg_data_home: path("XDG_DATA_HOME"),
            xdg_config_home: path("XDG_CONFIG_HOME"),
            xdg_runtime_dir: path("XDG_RUNTIME_DIR"),
            docker_config: path("DOCKER_CONFIG"),
            owner_idle_seconds: std::env::var("IMP_OWNER_IDLE_SECONDS").ok(),
            insecure_registries: std::env::var("IMP_INSECURE_REGISTRIES").ok(),
        })
    }

    fn default_data(&self) -> Option<PathBuf> {
        if self.is_root {
            return Some("/var/lib/imp".into());
        }
        let base = self.xdg_data_home.clone().or_else(|| Some(self.home.as_ref()?.join(".local/share")))?;
        Some(base.join("imp"))
    }

    fn default_runtime(&self) -> Option<PathBuf> {
        if self.is_root { Some("/run/imp".into()) } else { Some(self.xdg_runtime_dir.as_ref()?.join("imp")) }
    }

    fn default_file(&self) -> Option<PathBuf> {
        if self.is_root {
            return Some("/etc/imp/settings.toml".into());
        }
        let base = self.xdg_config_home.clone().or_else(|| Some(self.home.as_ref()?.join(".config")))?;
        Some(base.join("imp/settings.toml"))
    }

    /// Beside the program, as a build leaves it, or where packages put such things.
    fn default_guest_agent(&self, exists: impl Fn(&Path) -> bool) -> PathBuf {
        let directory = self.program.parent().unwrap_or(Path::new("/"));
        let beside = directory.join("guest-agent");
        let packaged = directory.parent().unwrap_or(Path::new("/")).join("libexec/imp/guest-agent");
        if !exists(&beside) && exists(&packaged) { packaged } else { beside }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("in the settings file, network.pool cannot be used")]
    Pool(#[source] PoolError),
    #[error("cannot read the settings file {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the settings file {path} is wrong")]
    Parse {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("{name} = {value:?} is not {expected}")]
    Value { name: &'static str, value: String, expected: &'static str },
    #[error("there is no {what} directory: set {variable}")]
    NoDirectory { what: &'static str, variable: &'static str },
}

impl Settings {
    pub(crate) fn read(flags: &Global, world: &World) -> Result<Self, Error> {
        let file = match (&flags.settings, world.default_file()) {
            (Some(path), _) => File::read(path)?,
            (None, Some(path)) => match File::read(&path) {
                Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    File::default()
                }
                file => file?,
            },
            (None, None) => File::default(),
        };
        Self::resolve(flags, file, world, |path| path.exists())
    }

    fn resolve(
        flags: &Global,
        file: File,
        world: &World,
        exists: impl Fn(&Path) -> bool,
    ) -> Result<Self, Error> {
        let data = flags.data_dir.clone().or(file.data_dir).or_else(|| world.default_data());
        let runtime = flags.runtime_dir.clone().or(file.runtime_dir).or_else(|| world.default_runtime());
        let missing = |what, variable| Error::NoDirectory { what, variable };
        let idle = match &world.owner_idle_seconds {
            Some(text) => Some(text.parse().map_err(|_| Error::Value {
                name: "IMP_OWNER_IDLE_SECONDS",
                value: text.clone(),
                expected: "a number of seconds",
            })?),
            None => file.owner_idle_seconds,
        };
        let mut registries = file.registries;
        if let Some(hosts) = &world.insecure_registries {
            let hosts = hosts.split(',').map(str::trim).filter(|host| !host.is_empty());
            registries.insecure.extend(hosts.map(str::to_owned));
        }
        if registries.docker_config.is_none() {
            registries.docker_config = docker_config(world.docker_config.clone(), world.home.clone());
        }
        let image_size_limit = match file.image_size_limit {
            None => None,
            Some(text) => Some(crate::value::bytes(&text).map_err(|_| Error::Value {
                name: "image-size-limit",
                value: text,
                expected: "a size like 20g",
            })?),
        };
        Ok(Self {
            layout: Layout {
                data: data.ok_or_else(|| missing("data", "IMP_DATA_DIR or HOME"))?,
                runtime: runtime.ok_or_else(|| missing("runtime", "IMP_RUNTIME_DIR or XDG_RUNTIME_DIR"))?,
            },
            guest_agent: flags
                .guest_agent
                .clone()
                .or(file.guest_agent)
                .unwrap_or_else(|| world.default_guest_agent(exists)),
            driver: driver(
                flags.driver.as_deref().map(|name| name.to_string_lossy().into_owned()).or(file.driver),
            )?,
            firecracker: flags.firecracker.clone().or(file.firecracker),
            qemu: flags.qemu.clone().or(file.qemu),
            registries,
            bridge: file.network.bridge()?,
            image_size_limit,
            owner_idle: idle.map_or(IDLE, Duration::from_secs),
            run: file.run,
        })
    }
}

fn driver(named: Option<String>) -> Result<DriverChoice, Error> {
    let Some(value) = named else { return Ok(DriverChoice::Auto) };
    let expected = "auto, firecracker or qemu";
    DriverChoice::named(&value).ok_or(Error::Value { name: "driver", value, expected })
}

impl File {
    fn read(path: &Path) -> Result<Self, Error> {
        let text = read_regular(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|source| Error::Parse { path: path.to_owned(), source: Box::new(source) })
    }

    fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }
}

/// No FIFO makes this wait, no device is read, and a file that is too large is refused rather than cut.
fn read_regular(path: &Path) -> io::Result<String> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = std::fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    String::from_utf8(made_up::content(file)?).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_settings_is_a_regular_one() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        let large = folder.path().join("large");
        std::fs::File::create(&large).unwrap().set_len(1 << 30).unwrap();
        for refused in [pipe, large] {
            assert!(matches!(File::read(&refused), Err(Error::Read { path, .. }) if path == refused));
        }
    }

    fn root() -> World {
        World {
            is_root: true,
            program: "/usr/bin/imp".into(),
            home: Some("/root".into()),
            xdg_data_home: None,
            xdg_config_home: None,
            xdg_runtime_dir: None,
            docker_config: None,
            owner_idle_seconds: None,
            insecure_registries: None,
        }
    }

    fn user() -> World {
        World {
            is_root: false,
            home: Some("/home/u".into()),
            xdg_runtime_dir: Some("/run/user/7".into()),
            ..root()
        }
    }

    fn resolve(flags: Global, file: &str, world: &World) -> Settings {
        Settings::resolve(&flags, File::parse(file).unwrap(), world, |_| false).unwrap()
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let file = "data-dir = '/file/data'\nqemu = '/file/qemu'\nowner-idle-seconds = 5";
        let settings =
            resolve(Global { data_dir: Some("/flag/data".into()), ..Global::default() }, file, &root());
        assert_eq!(settings.layout.data, Path::new("/flag/data"));
        assert_eq!(settings.qemu.as_deref(), Some(Path::new("/file/qemu")));
        assert_eq!(settings.owner_idle, Duration::from_secs(5));
        assert_eq!(settings.layout.runtime, Path::new("/run/imp"));
    }

    #[test]
    fn a_driver_is_one_that_there_is() {
        assert_eq!(resolve(Global::default(), "", &root()).driver, DriverChoice::Auto);
        assert_eq!(resolve(Global::default(), "driver = 'qemu'", &root()).driver, DriverChoice::Qemu);
        let flags = Global { driver: Some("firecracker".into()), ..Global::default() };
        assert_eq!(resolve(flags, "driver = 'qemu'", &root()).driver, DriverChoice::Firecracker);
        let wrong =
            Settings::resolve(&Global::default(), File::parse("driver = 'kvm'").unwrap(), &root(), |_| false);
        assert!(wrong.unwrap_err().to_string().contains("firecracker"));
    }

    #[test]
    fn a_variable_wins_over_the_file() {
        let world = World {
            owner_idle_seconds: Some("9".into()),
            insecure_registries: Some("a:1, b:2".into()),
            ..root()
        };
        let file = "owner-idle-seconds = 5\n[registries]\ninsecure = ['c:3']";
        let settings = resolve(Global::default(), file, &world);
        assert_eq!(settings.owner_idle, Duration::from_secs(9));
        assert_eq!(settings.registries.insecure, ["c:3", "a:1", "b:2"]);
    }

    #[test]
    fn a_user_has_directories_of_their_own() {
        let settings = resolve(Global::default(), "", &user());
        assert_eq!(settings.layout.data, Path::new("/home/u/.local/share/imp"));
        assert_eq!(settings.layout.runtime, Path::new("/run/user/7/imp"));
        let world = World { xdg_runtime_dir: None, ..user() };
        let error = Settings::resolve(&Global::default(), File::default(), &world, |_| false).unwrap_err();
        assert!(error.to_string().contains("XDG_RUNTIME_DIR"), "{error}");
    }

    #[test]
    fn the_guest_agent_is_found_beside_the_program_or_where_packages_put_it() {
        let find = |there: &'static str| root().default_guest_agent(|path| path == Path::new(there));
        assert_eq!(find("/usr/bin/guest-agent"), Path::new("/usr/bin/guest-agent"));
        assert_eq!(find("/usr/libexec/imp/guest-agent"), Path::new("/usr/libexec/imp/guest-agent"));
        assert_eq!(find(""), Path::new("/usr/bin/guest-agent"));
    }

    #[test]
    fn a_misspelt_setting_is_an_error() {
        assert!(File::parse("data-dri = '/x'").is_err());
        assert!(File::parse("[run]\nmem = '1g'").is_err());
    }
}
