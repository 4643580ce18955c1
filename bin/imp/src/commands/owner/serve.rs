//! `imp owner serve …`: becomes the owner. Started by other commands, whose arguments are read here without the command
//! line's own reader: what that touches would stay in the memory of a process that lives as long as its VMs.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use imp_embedded::client::Identity;
use imp_embedded::layout::Layout;
use imp_embedded::serve::{self, Settings};
use imp_embedded::start::{FAILED, OWNED, READY};
use imp_runtime::DriverChoice;
use imp_runtime::spec::{BridgeSettings, Outside, Pool};

use crate::context;
use crate::exit::Outcome;
use crate::output;

const WORDS: [&str; 2] = ["owner", "serve"];
const DATA: &str = "--data-dir";
const RUNTIME: &str = "--runtime-dir";
const GUEST_AGENT: &str = "--guest-agent";
const DRIVER: &str = "--driver";
const FIRECRACKER: &str = "--firecracker";
const QEMU: &str = "--qemu";
const POOL: &str = "--network-pool";
const POOL6: &str = "--network-pool6";
const OUTSIDE: &str = "--network-outside";
const ROUTED: &str = "routed";
const IDLE: &str = "--idle-seconds";
const BUILD: &str = "--build";

/// An owner that is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Serve {
    pub(crate) layout: Layout,
    pub(crate) guest_agent: PathBuf,
    pub(crate) driver: DriverChoice,
    pub(crate) firecracker: Option<PathBuf>,
    pub(crate) qemu: Option<PathBuf>,
    pub(crate) bridge: BridgeSettings,
    /// How long to stay without VMs and clients: whole seconds.
    pub(crate) idle_after: Duration,
    pub(crate) build: String,
}

impl Serve {
    /// The arguments of the program that becomes this owner.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = WORDS.map(OsString::from).to_vec();
        let mut say = |flag: &str, value: OsString| arguments.extend([flag.into(), value]);
        say(DATA, self.layout.data.clone().into());
        say(RUNTIME, self.layout.runtime.clone().into());
        say(GUEST_AGENT, self.guest_agent.clone().into());
        say(DRIVER, self.driver.name().into());
        if let Some(firecracker) = &self.firecracker {
            say(FIRECRACKER, firecracker.clone().into());
        }
        if let Some(qemu) = &self.qemu {
            say(QEMU, qemu.clone().into());
        }
        if let Some(pool) = &self.bridge.pool {
            say(POOL, pool.ipv4().to_string().into());
            if let Some(net) = pool.ipv6() {
                say(POOL6, net.to_string().into());
            }
        }
        if self.bridge.outside == Outside::Routed {
            say(OUTSIDE, ROUTED.into());
        }
        say(IDLE, self.idle_after.as_secs().to_string().into());
        say(BUILD, self.build.clone().into());
        arguments
    }

    /// What `arguments` gave; none if they are a command for somebody else.
    pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Option<Self> {
        let mut arguments = arguments.into_iter();
        for word in WORDS {
            arguments.next().filter(|argument| argument == word)?;
        }
        let (mut data, mut runtime, mut guest_agent, mut qemu) = (None, None, None, None);
        let (mut driver, mut firecracker) = (DriverChoice::Auto, None);
        let (mut pool, mut pool6, mut outside) = (None, None, Outside::Masquerade);
        let (mut idle_after, mut build) = (None, None);
        while let Some(flag) = arguments.next() {
            let value = arguments.next()?;
            match flag.to_str()? {
                DATA => data = Some(value.into()),
                RUNTIME => runtime = Some(value.into()),
                GUEST_AGENT => guest_agent = Some(value.into()),
                DRIVER => driver = DriverChoice::named(value.to_str()?)?,
                FIRECRACKER => firecracker = Some(value.into()),
                QEMU => qemu = Some(value.into()),
                POOL => pool = Some(value.to_str()?.parse().ok()?),
                POOL6 => pool6 = Some(value.to_str()?.parse().ok()?),
                OUTSIDE if value == ROUTED => outside = Outside::Routed,
                IDLE => idle_after = Some(Duration::from_secs(value.to_str()?.parse().ok()?)),
                BUILD => build = Some(value.into_string().ok()?),
                _ => return None,
            }
        }
        Some(Self {
            layout: Layout { data: data?, runtime: runtime? },
            guest_agent: guest_agent?,
            driver,
            firecracker,
            qemu,
            bridge: BridgeSettings {
                pool: pool.map(|ipv4| Pool::new(ipv4, pool6)).transpose().ok()?,
                outside,
            },
            idle_after: idle_after?,
            build: build?,
        })
    }

    pub(crate) fn run(self) -> Outcome {
        let result = self.serve();
        match &result {
            Ok(()) => return Ok(0),
            Err(error) if matches!(error.downcast_ref(), Some(serve::Error::Owned(_))) => {
                output::print(&format!("{OWNED}\n"))?;
            }
            Err(error) => output::print(&format!("{FAILED}{}\n", format!("{error:#}").replace('\n', " ")))?,
        }
        Ok(1)
    }

    fn serve(self) -> anyhow::Result<()> {
        // Away from the terminal of whoever started this; an error says that it is away already.
        let _ = rustix::process::setsid();
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        let filter = std::env::var("IMP_LOG").unwrap_or_else(|_| "info".to_owned());
        serve::log_to_file(&self.layout, &filter)?;
        let settings = Settings {
            layout: self.layout,
            guest_agent: self.guest_agent,
            driver: self.driver,
            firecracker: self.firecracker,
            qemu: self.qemu,
            bridge: self.bridge,
            idle_after: self.idle_after,
            identity: Identity {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                build: self.build,
                pid: std::process::id(),
            },
        };
        let ready = || {
            // Nobody to tell when whoever started this is gone.
            let _ = output::print(&format!("{READY}\n"));
        };
        let served = context::block_on(serve::serve(settings, ready)).context("no async runtime")?;
        served.map_err(anyhow::Error::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_an_owner_say_all_of_it() {
        let serve = Serve {
            layout: Layout { data: "/d".into(), runtime: "/run/--qemu".into() },
            guest_agent: "/agent".into(),
            driver: DriverChoice::Auto,
            firecracker: None,
            qemu: None,
            bridge: BridgeSettings::default(),
            idle_after: Duration::from_secs(7),
            build: "1-2".into(),
        };
        assert_eq!(Serve::parse(serve.arguments()), Some(serve.clone()));
        let programs = (Some("/firecracker".into()), Some("/qemu".into()));
        let with_qemu =
            Serve { driver: DriverChoice::Qemu, firecracker: programs.0, qemu: programs.1, ..serve };
        assert_eq!(Serve::parse(with_qemu.arguments()), Some(with_qemu.clone()));
        let pool = Pool::new("10.9.0.0/16".parse().unwrap(), Some("fd00:9::/64".parse().unwrap())).unwrap();
        let bridge = BridgeSettings { pool: Some(pool), outside: Outside::Routed };
        let with_bridge = Serve { bridge, ..with_qemu };
        assert_eq!(Serve::parse(with_bridge.arguments()), Some(with_bridge));
    }

    #[test]
    fn other_commands_are_no_owner() {
        for line in [&["ps"][..], &["owner", "stop"], &["owner", "serve"], &["owner", "serve", "--data-dir"]]
        {
            assert_eq!(Serve::parse(line.iter().map(OsString::from)), None, "{line:?}");
        }
    }
}
