//! PID 1: assembles the machine, starts the agent, and then only looks after what is left to it.
//!
//! ```text
//! mounts ─► timer looked at ─► modules ─► root over base and scratch ─► channel ─► agent started
//!        ─► other modules ─► reap, restart, hand over
//! ```
//! It cannot panic or exit, because that ends the machine: what fails is logged, and what cannot go on powers off.

pub(crate) mod arguments;
mod children;
mod command_line;
pub(crate) mod handover;
mod keeper;
mod modules;
mod mounts;
mod root;
mod supervise;
mod timer;
mod writeback;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use imp_protocol::boot::AGAIN;
use rustix::fs::{Mode, OFlags};

use self::children::Given;
use self::command_line::{ChannelName, CommandLine};
pub(crate) use self::keeper::keep;
use self::modules::Vsock;
pub use self::modules::requested;
use crate::channel::Endpoint;
use crate::log;
use crate::shutdown::{self, PowerOff};

/// Where devices are looked for, and how often, until their drivers have found them.
const LOOK: Duration = Duration::from_millis(1);
const APPEARS: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the kernel's command line: {0}")]
    CommandLine(#[from] command_line::Error),
    #[error("cannot mount {what}: {source}")]
    Mount { what: String, source: io::Error },
    #[error("{device} did not appear within {} s; is its driver in the initramfs?", APPEARS.as_secs())]
    NoDevice { device: String },
    #[error("cannot open {device}: {source}")]
    Open { device: PathBuf, source: io::Error },
    #[error("cannot prepare the root: {doing}: {source}")]
    Root { doing: &'static str, source: io::Error },
    #[error("cannot start the agent: {0}")]
    Agent(#[source] io::Error),
    #[error(transparent)]
    Timer(#[from] timer::Mistaken),
}

/// Runs the machine; does not return.
pub fn run() -> ! {
    let error = match assemble() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    if let Error::Timer(mistaken) = &error {
        log::error(format_args!("{AGAIN}{mistaken}"));
        shutdown::restart_at_once();
    }
    log::error(format_args!("the machine cannot run: {error}"));
    shutdown::finish(None, PowerOff::of_this_machine());
    // Only if the kernel refuses to end the machine. PID 1 must not end either.
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn assemble() -> Result<std::convert::Infallible, Error> {
    mounts::first()?;
    log::open();
    stage("kernel");
    writeback::relax();
    let text = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let command_line = CommandLine::parse(&text)?;
    if let Some(hz) = command_line.timer_hz {
        timer::look(hz)?;
    }
    let late = modules::load(match command_line.channel {
        ChannelName::Vsock(_) => Vsock::Channel,
        ChannelName::Port(_) => Vsock::Unused,
    });
    stage("modules");
    let base = wait_for(&command_line.base)?;
    let scratch = wait_for(&command_line.scratch)?;
    stage("disks");
    let power_off = command_line.power_off.unwrap_or_else(PowerOff::of_this_machine);
    let scratch = root::assemble(&base, &scratch)?;
    stage("root");
    let channel = match command_line.channel {
        ChannelName::Vsock(port) => Endpoint::Vsock(port),
        ChannelName::Port(name) => Endpoint::Port {
            channel: open_port(&name)?,
            lane: command_line.lane.and_then(|name| match open_port(&name) {
                Ok(lane) => Some(lane),
                Err(error) => {
                    log::warn(format_args!("no lane, archives go over the channel: {error}"));
                    None
                }
            }),
        },
    };
    stage("channel");
    supervise::supervise(&Given { channel, scratch: Some(scratch), power_off }, late)
}

fn wait_for(device: &Path) -> Result<PathBuf, Error> {
    until(|| device.exists().then(|| device.to_owned()), || device.display().to_string())
}

/// Opens the virtio-serial port of this name. Ports appear some time after their driver is loaded.
fn open_port(name: &str) -> Result<OwnedFd, Error> {
    let device = until(|| find_port(name), || format!("the virtio-serial port {name:?}"))?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(&device, flags, Mode::empty())
        .map_err(|error| Error::Open { device, source: error.into() })
}

fn find_port(name: &str) -> Option<PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    let mut named = ports.flatten().filter(|port| {
        fs::read_to_string(port.path().join("name")).is_ok_and(|text| text.trim_end() == name)
    });
    let device = Path::new("/dev").join(named.next()?.file_name());
    device.exists().then_some(device)
}

fn until<T>(mut found: impl FnMut() -> Option<T>, device: impl Fn() -> String) -> Result<T, Error> {
    let started = Instant::now();
    loop {
        if let Some(found) = found() {
            return Ok(found);
        }
        if started.elapsed() > APPEARS {
            return Err(Error::NoDevice { device: device() });
        }
        std::thread::sleep(LOOK);
    }
}

/// Says in the kernel's log what is done, and when: the log's own times are those of the boot.
pub(crate) fn stage(done: &str) {
    log::debug(format_args!("{done} done"));
}
