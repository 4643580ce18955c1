//! Makes the guest the machine that its host wants: clock, entropy, names, network, plain file systems.

pub(crate) mod etc;
pub(crate) mod netlink;
pub(crate) mod network;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use imp_protocol::guest::{ConfigureRequest, ConfigureResponse};
use rustix::time::{ClockId, Timespec};

use self::etc::Names;
use self::network::Interface;
use crate::log;

/// Container tools put overlays on their own data, which an overlay does not bear.
const PLAIN_PATHS: [&str; 2] = ["/var/lib/docker", "/var/lib/containerd"];
const LONGEST_HOSTNAME: usize = 64;
const LEAST_ENTROPY: usize = 32;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("`hostname` must have at most {LONGEST_HOSTNAME} characters of [a-zA-Z0-9.-], not {0:?}")]
    Hostname(String),
    #[error("`entropy` must have at least {LEAST_ENTROPY} bytes, not {0}")]
    Entropy(usize),
    #[error("`plain_paths` must be absolute and without '..', not {0:?}")]
    PlainPath(String),
    #[error(transparent)]
    Network(#[from] network::ParseError),
    #[error(transparent)]
    Names(#[from] etc::ParseError),
}

#[derive(Debug, thiserror::Error)]
enum PlainError {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Copy(#[from] crate::files::Error),
}

/// A request that makes sense.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) hostname: Option<String>,
    clock: Option<Timespec>,
    pub(crate) entropy: Option<bytes::Bytes>,
    pub(crate) network: Option<Interface>,
    pub(crate) names: Names,
    plain_paths: Vec<PathBuf>,
}

impl Wanted {
    pub(crate) fn parse(request: ConfigureRequest) -> Result<Self, Error> {
        let letters =
            |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'));
        if request.hostname.len() > LONGEST_HOSTNAME || !letters(&request.hostname) {
            return Err(Error::Hostname(request.hostname.chars().take(LONGEST_HOSTNAME).collect()));
        }
        if !request.entropy.is_empty() && request.entropy.len() < LEAST_ENTROPY {
            return Err(Error::Entropy(request.entropy.len()));
        }
        let plain_paths = if request.plain_paths.is_empty() {
            PLAIN_PATHS.iter().map(PathBuf::from).collect()
        } else {
            request.plain_paths.iter().map(|path| plain_path(path)).collect::<Result<_, _>>()?
        };
        let names = Names::parse(&request)?;
        let nanoseconds = request.unix_time_nanoseconds;
        Ok(Self {
            hostname: Some(request.hostname).filter(|name| !name.is_empty()),
            clock: (nanoseconds > 0).then_some(Timespec {
                tv_sec: (nanoseconds / 1_000_000_000) as i64,
                tv_nsec: (nanoseconds % 1_000_000_000) as i64,
            }),
            entropy: Some(request.entropy).filter(|entropy| !entropy.is_empty()),
            network: request.network.map(Interface::parse).transpose()?,
            names,
            plain_paths,
        })
    }
}

fn plain_path(text: &str) -> Result<PathBuf, Error> {
    let path = PathBuf::from(text);
    let whole =
        path.is_absolute() && path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    if whole && !text.contains('\0') { Ok(path) } else { Err(Error::PlainPath(text.to_owned())) }
}

/// Does what it can and says what that was: the host decides whether it is enough. Entropy comes first, before anything
/// could draw random numbers, then the clock.
pub(crate) fn configure(wanted: &Wanted, scratch: Option<&OwnedFd>) -> ConfigureResponse {
    let entropy_credited = wanted.entropy.as_ref().is_some_and(|entropy| done("entropy", credit(entropy)));
    let clock_set = wanted.clock.is_some_and(|now| {
        done("clock", rustix::time::clock_settime(ClockId::Realtime, now).map_err(io::Error::from))
    });
    let hostname_set = wanted.hostname.as_ref().is_some_and(|name| {
        done("hostname", rustix::system::sethostname(name.as_bytes()).map_err(io::Error::from))
    });
    etc::write(Path::new("/etc"), &wanted.names);
    done("loopback", network::bring_up_loopback());
    let network_configured =
        wanted.network.as_ref().is_some_and(|interface| done("network", network::configure(interface)));
    if let Some(scratch) = scratch {
        for path in &wanted.plain_paths {
            done("plain path", make_plain(path, scratch));
        }
    }
    ConfigureResponse { clock_set, entropy_credited, hostname_set, network_configured }
}

fn done<E: std::fmt::Display>(what: &str, result: Result<(), E>) -> bool {
    match result {
        Ok(()) => true,
        Err(error) => {
            log::warn(format_args!("{what} not configured: {error}"));
            false
        }
    }
}

fn credit(entropy: &[u8]) -> io::Result<()> {
    imp_sys::entropy::credit(File::options().write(true).open("/dev/urandom")?, entropy)
}

/// Mounts a directory of the scratch disk over `path`, holding what the image has there.
fn make_plain(path: &Path, scratch: &OwnedFd) -> Result<(), PlainError> {
    // A guest process may replace what stands at the path: what is mounted over is what was checked.
    DirBuilder::new().recursive(true).mode(0o711).create(path)?;
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let target = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(io::Error::from)?;
    let scratch_path = format!("/proc/self/fd/{}", scratch.as_raw_fd());
    let target_path = format!("/proc/self/fd/{}", target.as_raw_fd());
    let same_disk = fs::metadata(&target_path).and_then(|there| {
        use std::os::unix::fs::MetadataExt;
        Ok(there.dev() == fs::metadata(&scratch_path)?.dev())
    })?;
    if same_disk {
        return Ok(());
    }
    let name: Vec<u8> =
        path.as_os_str().as_bytes().iter().map(|byte| if *byte == b'/' { b'%' } else { *byte }).collect();
    let source = Path::new(&scratch_path).join("plain").join(std::ffi::OsStr::from_bytes(&name));
    if !source.is_dir() {
        DirBuilder::new().recursive(true).mode(0o711).create(&source)?;
        // Images seldom have anything here; what they have goes along.
        crate::archive::copy_directory(path, &source)?;
    }
    rustix::mount::mount_bind(&source, &target_path).map_err(io::Error::from)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_make_no_sense_are_refused() {
        let refused = |request| Wanted::parse(request).unwrap_err();
        let hostname = ConfigureRequest { hostname: "a b".into(), ..Default::default() };
        assert!(matches!(refused(hostname), Error::Hostname(_)));
        let entropy = ConfigureRequest { entropy: vec![1; 31].into(), ..Default::default() };
        assert!(matches!(refused(entropy), Error::Entropy(31)));
        for path in ["var", "/a/../b", "/a\0b"] {
            let plain = ConfigureRequest { plain_paths: vec![path.into()], ..Default::default() };
            assert!(matches!(refused(plain), Error::PlainPath(_)), "{path:?}");
        }
    }

    #[test]
    fn an_empty_request_asks_for_the_plain_paths_of_container_tools() {
        let wanted = Wanted::parse(ConfigureRequest::default()).unwrap();
        assert_eq!(
            wanted.plain_paths,
            [PathBuf::from("/var/lib/docker"), PathBuf::from("/var/lib/containerd")]
        );
        assert!(wanted.clock.is_none() && wanted.entropy.is_none() && wanted.hostname.is_none());
    }
}
