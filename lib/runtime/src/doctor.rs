//! What of this machine works: every check is made by trying, and a failed one comes with the command that repairs it.

use serde::Serialize;

use crate::cgroup;
use crate::id::VmId;
use crate::layout::Layout;
use crate::runtime::Config;
use crate::spec::KernelChoice;
use crate::status::Accelerator;
use crate::vmm::drivers::{self, DriverChoice, Trials};
use crate::vmm::firecracker::privileges;
use crate::vmm::firecracker::probe::Found;
use crate::vmm::memory::Freshness;
use crate::{boot, ledger, network, random, vmm};

#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was tried, in a word: "processor", "host kernel", "user", "kvm", "firecracker", "jailer", "qemu", "driver",
    /// "kernel", "agent", "network", "bridge", "limits".
    pub name: &'static str,
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
pub enum Verdict {
    Good,
    /// Imp works without it, with less.
    Degraded {
        repair: Option<String>,
    },
    Bad {
        repair: String,
    },
}

mod host;

/// Examines this machine; no owner is needed.
pub async fn examine(config: &Config) -> Vec<Check> {
    let layout = Layout::new(config.data.clone(), config.runtime.clone());
    let written = std::fs::create_dir_all(layout.data());
    tracing::debug!(?written, "data directory");
    let programs = config.programs();
    // What was remembered is what is in question.
    let trials = Trials {
        firecracker: drivers::try_firecracker(&programs, &layout, Freshness::Now).await,
        qemu: drivers::try_qemu(&programs, &layout, Freshness::Now).await,
    };
    let mut checks = this_host();
    checks.extend([kvm(&trials), firecracker(&trials)]);
    checks.extend(trials.firecracker.as_ref().ok().map(jailer));
    checks.extend([qemu(&trials), driver(config.driver, &trials)]);
    checks.push(kernel(&layout));
    checks.push(agent(config));
    checks.push(network(&layout).await);
    checks.push(network::check::bridge(&layout));
    checks.push(limits());
    checks
}

fn this_host() -> Vec<Check> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    // One that cannot ask has nothing.
    let has = privileges::own().unwrap_or_else(|_| rustix::thread::CapabilitySet::empty());
    let uid = rustix::process::geteuid().as_raw();
    let user = host::user(uid, &privileges::missing_for_jails(has));
    vec![host::processor(&cpuinfo), host::kernel(&release), user]
}

/// The device as this user finds it; then, whether a guest runs on it.
fn kvm(trials: &Trials) -> Check {
    let slower = "guests are emulated, which is slower";
    let degraded = |repair: Option<&str>, text: String| Check {
        name: "kvm",
        verdict: Verdict::Degraded { repair: repair.map(str::to_owned) },
        found: text,
    };
    match (vmm::kvm::usable(), &trials.firecracker, &trials.qemu) {
        (Err(error @ vmm::kvm::Unusable::NotAllowed(_)), _, _) => degraded(
            Some("usermod -aG kvm $USER, then log in again"),
            format!("{}; {slower}", crate::vm::chain(&error)),
        ),
        // Whether the processor or the machine's own host allows it is not for a command to change.
        (Err(error), _, _) => degraded(None, format!("{}; {slower}", crate::vm::chain(&error))),
        (Ok(()), Ok(_), _) => good("kvm", "it has what Firecracker needs, and a guest ran on it".into()),
        (Ok(()), Err(_), Ok(found)) if found.accelerator() == Accelerator::Kvm => good("kvm", found.why()),
        (Ok(()), Err(_), Ok(found)) => degraded(None, format!("{}; {slower}", found.why())),
        (Ok(()), Err(_), Err(_)) => {
            degraded(None, "it opens, and nothing is there to run a guest on it".into())
        }
    }
}

fn firecracker(trials: &Trials) -> Check {
    match &trials.firecracker {
        Ok(found) => {
            let text = format!("{} {}; a guest ran", found.program.display(), found.version);
            good("firecracker", text)
        }
        Err(error) => Check {
            name: "firecracker",
            verdict: Verdict::Degraded { repair: None },
            found: crate::vm::chain(error),
        },
    }
}

/// What stands between the host and a guest that has broken out of its machine.
fn jailer(found: &Found) -> Check {
    match &found.jailer {
        Ok(jailer) => good(
            "jailer",
            format!(
                "{}; a guest ran in a jail, so each VM has a user and a root directory of its own",
                jailer.display()
            ),
        ),
        Err(why) => Check {
            name: "jailer",
            verdict: Verdict::Degraded { repair: None },
            found: format!(
                "{why}: Firecracker runs as this user and sees his files; its seccomp filters and the VM's limits remain"
            ),
        },
    }
}

/// Not being there matters where nothing else is.
fn qemu(trials: &Trials) -> Check {
    let repair = "apt-get install qemu-system-x86".to_owned();
    match (&trials.qemu, &trials.firecracker) {
        (Ok(found), _) => {
            let clock = found.tsc_khz.map(|khz| format!(", clock at {khz} kHz")).unwrap_or_default();
            let text = format!("{} {}{clock}; a guest ran", found.program.display(), found.version);
            good("qemu", text)
        }
        (Err(error), Ok(_)) => Check {
            name: "qemu",
            verdict: Verdict::Degraded { repair: Some(repair) },
            found: crate::vm::chain(error),
        },
        (Err(error), Err(_)) => {
            Check { name: "qemu", verdict: Verdict::Bad { repair }, found: crate::vm::chain(error) }
        }
    }
}

/// What new VMs run in, and why.
fn driver(choice: DriverChoice, trials: &Trials) -> Check {
    let by_choice = match choice {
        DriverChoice::Auto => "chosen by itself",
        DriverChoice::Firecracker | DriverChoice::Qemu => "as it was asked for",
    };
    let bad = |driver: &str| Check {
        name: "driver",
        verdict: Verdict::Bad { repair: "unset IMP_DRIVER, or repair what is named above".into() },
        found: format!("{driver} was asked for and does not work here"),
    };
    match (choice, &trials.firecracker, &trials.qemu) {
        (DriverChoice::Auto, Ok(found), Ok(_)) => good(
            "driver",
            format!("firecracker {}, {by_choice}; QEMU for VMs with --network user", found.version),
        ),
        (DriverChoice::Auto | DriverChoice::Firecracker, Ok(found), _) => {
            good("driver", format!("firecracker {}, {by_choice}", found.version))
        }
        (DriverChoice::Auto, Err(_), Ok(found)) => {
            good("driver", format!("qemu {}, {by_choice}: Firecracker does not work here", found.version))
        }
        (DriverChoice::Qemu, _, Ok(found)) => good("driver", format!("qemu {}, {by_choice}", found.version)),
        (DriverChoice::Firecracker, Err(_), _) => bad("Firecracker"),
        (DriverChoice::Qemu, _, Err(_)) => bad("QEMU"),
        (DriverChoice::Auto, Err(_), Err(_)) => Check {
            name: "driver",
            verdict: Verdict::Bad { repair: "apt-get install qemu-system-x86".into() },
            found: "no VM runs here".into(),
        },
    }
}

fn kernel(layout: &Layout) -> Check {
    match boot::kernel(layout, &KernelChoice::Default) {
        Ok(kernel) => {
            let release = kernel.facts.release.unwrap_or_else(|| "unnamed".into());
            good("kernel", format!("{release} at {}", kernel.facts.path.display()))
        }
        Err(error) => Check {
            name: "kernel",
            verdict: Verdict::Bad { repair: "./dev setup".into() },
            found: crate::vm::chain(&error),
        },
    }
}

fn agent(config: &Config) -> Check {
    let path = &config.guest_agent;
    match std::fs::File::open(path) {
        Ok(_) => good("agent", path.display().to_string()),
        Err(error) => Check {
            name: "agent",
            verdict: Verdict::Bad { repair: "./dev setup".into() },
            found: format!("{}: {error}", path.display()),
        },
    }
}

async fn network(layout: &Layout) -> Check {
    let id = VmId::from_random(random::bytes());
    let vm = layout.vm(&id);
    let tried = network::passt::program().and_then(|program| {
        std::fs::create_dir_all(vm.data())
            .map_err(|source| network::passt::Error::Open { path: vm.data().to_owned(), source })?;
        network::passt::start(&program, &id, &vm)
    });
    let check = match tried {
        Ok(network) => {
            // One that does not like its arguments ends at once.
            let ended = tokio::time::timeout(STARTS, network.process.ended()).await;
            let said = std::fs::read_to_string(vm.network_log()).unwrap_or_default();
            network.process.kill();
            network.process.ended().await;
            match ended {
                Err(_) => good("network", "passt runs".into()),
                Ok(end) => Check {
                    name: "network",
                    verdict: Verdict::Degraded { repair: Some("apt-get install passt".into()) },
                    found: format!("passt ended with {end}: {}", said.lines().last().unwrap_or_default()),
                },
            }
        }
        Err(error) => Check {
            name: "network",
            verdict: Verdict::Degraded { repair: Some("apt-get install passt".into()) },
            found: crate::vm::chain(&error),
        },
    };
    if let Err(error) = ledger::remove_directory(vm.data()) {
        tracing::warn!(%error, "a trial directory is left");
    }
    check
}

/// By then a passt that cannot run has ended.
const STARTS: std::time::Duration = std::time::Duration::from_millis(300);

fn limits() -> Check {
    let id = VmId::from_random(random::bytes());
    let trial = cgroup::Limits { memory_bytes: 1 << 30, cpu_millis: 1000, threads: 64 };
    let groups = cgroup::make(&id, &trial);
    if let Err(error) = cgroup::remove(&groups.directories) {
        tracing::warn!(%error, "a trial control group is left");
    }
    if groups.not_enforced.is_empty() {
        return good("limits", "memory, processors and threads of a VM are limited by control groups".into());
    }
    // Where a group was made the host lets it, and what is missing is for its administrator.
    let repair = (groups.directories.is_empty()).then(cgroup::repair).flatten();
    let missing = groups.not_enforced.iter().map(|limit| format!("{}: {}", limit.limit, limit.why));
    let text = format!(
        "the VMM alone limits its guest; not enforced besides: {}",
        missing.collect::<Vec<_>>().join("; ")
    );
    Check { name: "limits", verdict: Verdict::Degraded { repair }, found: text }
}

fn good(name: &'static str, found: String) -> Check {
    Check { name, verdict: Verdict::Good, found }
}
