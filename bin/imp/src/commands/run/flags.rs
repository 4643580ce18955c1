//! The flags of `imp run`, and the form in which each is written.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::path::{Component, Path};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use imp_runtime::spec::{Allow, Bytes, Cidr, CopiedMount, MountAccess, PublishedPort};

use crate::terminal::DetachKeys;
use crate::value;

mod machine;
mod refused;
mod variables;
pub(crate) use machine::{Machine, Network, Pull};
pub(crate) use refused::explain;
pub(crate) use variables::{Secrets, Variables};

/// What a machine has already that is made of a snapshot.
const NOT_OF_A_SNAPSHOT: [&str; 7] =
    ["image_and_command", "Machine", "balloon", "volumes", "mounts", "tty", "stop_timeout"];
/// What a VM was given when its pool prepared it.
const NOT_OF_A_POOL: [&str; 4] = ["egress", "allow", "deny", "ipv6"];

/// Create a VM from an image and run a program in it
///
/// The program's exit status is passed on: 128 + n when a signal n ended it, 126 or 127 when it could not be
/// started, 125 when Imp itself failed. Without -d the program's output and signals are connected to this command. If
/// the command is killed the VM goes on; with -i and no -t the program's input is closed then.
#[derive(Debug, Args)]
#[command(
    override_usage = "imp run [FLAGS] IMAGE [--] [COMMAND] [ARGUMENT]...\n       imp run [FLAGS] --template TEMPLATE | --pool POOL"
)]
pub(crate) struct Run {
    /// The image, then the program and its arguments in the place of the image's CMD
    ///
    /// IMAGE is a name in a registry, a digest of an image that is here, or an archive as in `oci:DIR`,
    /// `oci-archive:FILE` or `docker-archive:FILE`. What follows it is taken literally: no shell.
    #[arg(
        required_unless_present_any = ["template", "pool"],
        conflicts_with = "Secrets",
        trailing_var_arg = true,
        value_name = "IMAGE [COMMAND]"
    )]
    pub(crate) image_and_command: Vec<std::ffi::OsString>,
    /// Make the VM of a template instead of an image: its program runs already, and goes on from there
    ///
    /// A name, or the beginning of a digest, as `imp template ls` shows them. The machine and the program are the
    /// template's; variables and secrets are for what is started from then on.
    #[arg(long, value_name = "TEMPLATE", conflicts_with_all = NOT_OF_A_SNAPSHOT, conflicts_with = "pool")]
    pub(crate) template: Option<String>,
    /// Take a VM that a pool has prepared: as with --template, and sooner
    #[arg(long, value_name = "POOL", conflicts_with_all = NOT_OF_A_SNAPSHOT, conflicts_with_all = NOT_OF_A_POOL)]
    pub(crate) pool: Option<String>,

    /// Send this command's input to the program; with -d its input stays open, for `imp attach`
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the program a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Print the VM's id and leave it running
    #[arg(short, long, conflicts_with = "timings")]
    pub(crate) detach: bool,
    /// Remove the VM with its disk and logs when the program has ended
    #[arg(long)]
    pub(crate) rm: bool,
    /// Name of the VM: 1 to 63 letters, digits, '_', '.' or '-' [default: made up; with --pool the pool's]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Host name of the guest [default: the VM's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) hostname: Option<String>,
    /// A label; may be repeated
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub(crate) labels: Vec<String>,

    #[command(flatten)]
    pub(crate) variables: Variables,
    #[command(flatten)]
    pub(crate) secrets: Secrets,

    #[command(flatten)]
    pub(crate) machine: Machine,
    /// Give the machine a balloon: `imp update --memory` then takes memory of the running guest back, and returns it
    #[arg(long)]
    pub(crate) balloon: bool,
    /// Time between the stop signal and the end of the machine, in seconds
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true,
          default_value = "10", value_parser = value::duration)]
    pub(crate) stop_timeout: Duration,

    /// Copy a directory or file into the VM before the program starts; `ro` makes it read-only. May be repeated
    ///
    /// The VM gets a copy: what it changes stays in it. `imp cp` brings results out.
    #[arg(short, long = "volume", value_name = "PATH:GUEST-PATH[:ro]")]
    pub(crate) volumes: Vec<Volume>,
    /// The same in words; may be repeated
    #[arg(long = "mount", value_name = "type=copy,source=PATH,target=PATH[,readonly]")]
    pub(crate) mounts: Vec<Mount>,
    /// Lead a port of this machine to one of the guest; without HOST-PORT a free one is taken. May be repeated
    ///
    /// Without ADDRESS it is every IPv4 address of this machine, as docker does; write 127.0.0.1 to keep it here. In a
    /// bridge network connections reach the guest's address there, else its loopback.
    #[arg(short, long = "publish", value_name = "[[ADDRESS:]HOST-PORT:]GUEST-PORT")]
    pub(crate) publish: Vec<Published>,
    /// What the guest may reach beside what --allow and --deny name; implies --network bridge [default: allow]
    ///
    /// Cloud metadata, link-local addresses and this machine's own addresses are never reached.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) egress: Option<EgressDefault>,
    /// Something that the guest may reach; implies --network bridge, and --egress deny unless that says otherwise
    ///
    /// TARGET is an address, a network as in 10.0.0.0/8, a name, or `*.` and a name for all below it. PORTS is a number
    /// or FIRST-LAST, of TCP unless `/udp` follows; IPv6 stands in brackets before it. May be repeated.
    #[arg(long, value_name = "TARGET[:PORTS]")]
    pub(crate) allow: Vec<Allow>,
    /// An address or network that the guest may not reach, whatever is allowed; implies --network bridge. May be repeated
    #[arg(long, value_name = "NETWORK")]
    pub(crate) deny: Vec<Denied>,
    /// Give the guest IPv6 too; implies --network bridge
    #[arg(long)]
    pub(crate) ipv6: bool,

    /// No progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Print on stderr how long each stage took
    #[arg(long)]
    pub(crate) timings: bool,
    /// Pass signals on to the program; `--sig-proxy=false` keeps them
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
          default_missing_value = "true", require_equals = true)]
    pub(crate) sig_proxy: bool,
    /// Keys that leave the program running
    #[arg(long, value_name = "KEYS", allow_hyphen_values = true, default_value = "ctrl-p,ctrl-q")]
    pub(crate) detach_keys: DetachKeys,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EgressDefault {
    /// Everything
    Allow,
    /// Nothing
    Deny,
}

/// `--deny`: a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Denied(pub(crate) Cidr);

impl FromStr for Denied {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        text.parse().map(Self).map_err(|_| Error::Denied(text.to_owned()))
    }
}

/// `-v`: what is copied where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Volume(pub(crate) CopiedMount);

/// `--mount`: the same in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount(pub(crate) CopiedMount);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Error {
    #[error("write PATH:GUEST-PATH, or PATH:GUEST-PATH:ro for a read-only copy")]
    Volume,
    #[error("{0:?} looks like a named volume, and there are none: write a path with a '/', as in ./{0}")]
    NamedVolume(String),
    #[error("{0:?} is not an absolute path in the guest")]
    Relative(String),
    #[error(
        "nothing can be copied to {0:?}: /proc, /sys, /dev and /.imp belong to the guest's kernel and to Imp; any other path is free, /dev/shm too"
    )]
    Reserved(String),
    #[error("write type=copy,source=PATH,target=PATH and optionally readonly; {0:?} is none of these")]
    Mount(String),
    #[error("`source` and `target` must both be there")]
    MountLacks,
    #[error("write GUEST-PORT, HOST-PORT:GUEST-PORT or ADDRESS:HOST-PORT:GUEST-PORT, ports from 1 to 65535")]
    Port,
    #[error("only TCP ports can be published")]
    Protocol,
    #[error("{0:?} is neither an address nor a network as in 10.0.0.0/8")]
    Denied(String),
}

impl FromStr for Volume {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut parts = text.split(':');
        let (Some(source), Some(target)) = (parts.next(), parts.next()) else { return Err(Error::Volume) };
        let access = match parts.next() {
            None | Some("rw") => MountAccess::ReadWrite,
            Some("ro") => MountAccess::ReadOnly,
            Some(_) => return Err(Error::Volume),
        };
        if parts.next().is_some() || source.is_empty() {
            return Err(Error::Volume);
        }
        if !source.contains('/') && source != "." && source != ".." {
            return Err(Error::NamedVolume(source.to_owned()));
        }
        mount(source, target, access).map(Self)
    }
}

impl FromStr for Mount {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (mut source, mut target, mut access) = (None, None, MountAccess::ReadWrite);
        for part in text.split(',') {
            match part.split_once('=').unwrap_or((part, "")) {
                ("type", "copy" | "bind") => {}
                ("source" | "src", path) => source = Some(path),
                ("target" | "destination" | "dst", path) => target = Some(path),
                ("readonly" | "ro", "" | "true") => access = MountAccess::ReadOnly,
                ("readonly" | "ro", "false") => access = MountAccess::ReadWrite,
                _ => return Err(Error::Mount(part.to_owned())),
            }
        }
        mount(source.ok_or(Error::MountLacks)?, target.ok_or(Error::MountLacks)?, access).map(Self)
    }
}

fn mount(source: &str, target: &str, access: MountAccess) -> Result<CopiedMount, Error> {
    if !Path::new(target).is_absolute() {
        return Err(Error::Relative(target.to_owned()));
    }
    if is_reserved(target) {
        return Err(Error::Reserved(target.to_owned()));
    }
    let relative = || Error::Relative(target.to_owned());
    Ok(CopiedMount { source: source.into(), target: Bytes::new(target).map_err(|_| relative())?, access })
}

/// Whether a path of the guest leads to what its kernel makes up, or what the agent needs. `..` is taken as if no
/// directory were a link; what a link leads to is known in the guest only.
fn is_reserved(target: &str) -> bool {
    let mut path = std::path::PathBuf::from("/");
    for component in Path::new(target).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::ParentDir => drop(path.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    ["/proc", "/sys", "/dev", "/.imp"].iter().any(|reserved| path.starts_with(reserved))
        && !path.starts_with("/dev/shm")
}

/// `-p`: a port of this machine and one of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Published(pub(crate) PublishedPort);

impl FromStr for Published {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let text = match text.split_once('/') {
            None => text,
            Some((text, "tcp")) => text,
            Some(_) => return Err(Error::Protocol),
        };
        let (rest, guest) = text.rsplit_once(':').unwrap_or(("", text));
        let (address, host) = match rest.rsplit_once(':') {
            Some((address, host)) => (Some(address), host),
            None => (None, rest),
        };
        let address = match address {
            None => Ipv4Addr::UNSPECIFIED.into(),
            Some(address) => {
                let bare = address.strip_prefix('[').and_then(|address| address.strip_suffix(']'));
                bare.unwrap_or(address).parse::<IpAddr>().map_err(|_| Error::Port)?
            }
        };
        let host = if host.is_empty() { 0 } else { host.parse::<u16>().map_err(|_| Error::Port)? };
        let guest = guest.parse::<NonZeroU16>().map_err(|_| Error::Port)?;
        Ok(Self(PublishedPort { host: SocketAddr::new(address, host), guest }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(source: &str, target: &str, access: MountAccess) -> CopiedMount {
        CopiedMount { source: source.into(), target: Bytes::new(target).unwrap(), access }
    }

    #[test]
    fn volumes_are_written_as_for_docker() {
        let volume = |text: &str| text.parse::<Volume>().map(|volume| volume.0);
        assert_eq!(volume("./a:/b"), Ok(copied("./a", "/b", MountAccess::ReadWrite)));
        assert_eq!(volume("/a:/b:ro"), Ok(copied("/a", "/b", MountAccess::ReadOnly)));
        assert_eq!(volume(".:/b:rw"), Ok(copied(".", "/b", MountAccess::ReadWrite)));
        assert_eq!(volume("data:/b"), Err(Error::NamedVolume("data".into())));
        assert_eq!(volume("/a:b"), Err(Error::Relative("b".into())));
        for reserved in ["/proc", "/proc/sys", "//sys/", "/dev/../dev/null", "/a/../.imp"] {
            assert_eq!(volume(&format!("/a:{reserved}")), Err(Error::Reserved(reserved.into())));
        }
        for free in ["/process", "/dev/shm/a", "/proc/../a", "/a/proc"] {
            assert!(volume(&format!("/a:{free}")).is_ok(), "{free}");
        }
        for bad in ["/a", "/a:/b:z", "/a:/b:ro:x", ":/b"] {
            assert_eq!(volume(bad), Err(Error::Volume), "{bad}");
        }
    }

    #[test]
    fn mounts_are_written_as_for_docker() {
        let mount = |text: &str| text.parse::<Mount>().map(|mount| mount.0);
        assert_eq!(mount("type=bind,src=a,dst=/b"), Ok(copied("a", "/b", MountAccess::ReadWrite)));
        assert_eq!(mount("source=/a,target=/b,readonly"), Ok(copied("/a", "/b", MountAccess::ReadOnly)));
        assert_eq!(mount("type=tmpfs,target=/b"), Err(Error::Mount("type=tmpfs".into())));
        assert_eq!(mount("target=/b"), Err(Error::MountLacks));
    }

    #[test]
    fn ports_are_written_as_for_docker() {
        let port =
            |text: &str| text.parse::<Published>().map(|port| (port.0.host.to_string(), port.0.guest.get()));
        assert_eq!(port("80"), Ok(("0.0.0.0:0".into(), 80)));
        assert_eq!(port("8080:80"), Ok(("0.0.0.0:8080".into(), 80)));
        assert_eq!(port("127.0.0.1:8080:80/tcp"), Ok(("127.0.0.1:8080".into(), 80)));
        assert_eq!(port("127.0.0.1::80"), Ok(("127.0.0.1:0".into(), 80)));
        assert_eq!(port("[::1]:8080:80"), Ok(("[::1]:8080".into(), 80)));
        assert_eq!(port("53:53/udp"), Err(Error::Protocol));
        for bad in ["", "0", "70000", "a:80", "80:", "1.2.3:1:1", "1:0"] {
            assert_eq!(port(bad), Err(Error::Port), "{bad}");
        }
    }
}
