//! What of this machine works: every check is made by trying, and a failed one comes with the command that repairs it.

use serde::Serialize;

use crate::cgroup;
use crate::id::VmId;
use crate::layout::Layout;
use crate::runtime::Config;
use crate::spec::KernelChoice;
use crate::vmm::qemu::probe::{self, Found, Freshness, Kvm};
use crate::{boot, ledger, network, random};

#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was tried, in a word: "qemu", "kvm", "kernel", "agent", "network", "limits".
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

/// Examines this machine; no owner is needed.
pub async fn examine(config: &Config) -> Vec<Check> {
    let layout = Layout::new(config.data.clone(), config.runtime.clone());
    let found = match crate::runtime::qemu(config) {
        // What was remembered is what is in question.
        Ok(program) => {
            let written = std::fs::create_dir_all(layout.data());
            tracing::debug!(?written, "data directory");
            probe::probe(&program, &layout.probes(), Freshness::Now).await
        }
        Err(error) => Err(error),
    };
    let mut checks = vec![qemu(&found)];
    checks.extend(found.as_ref().ok().map(kvm));
    checks.push(kernel(&layout));
    checks.push(agent(config));
    checks.push(network(&layout).await);
    checks.push(limits());
    checks
}

fn qemu(found: &Result<Found, probe::Error>) -> Check {
    match found {
        Ok(found) => {
            let clock = found.tsc_khz.map(|khz| format!(", clock at {khz} kHz")).unwrap_or_default();
            let text = format!("{} {}{clock}; a guest ran", found.program.display(), found.version);
            good("qemu", text)
        }
        Err(error) => {
            let repair = "apt-get install qemu-system-x86".to_owned();
            Check { name: "qemu", verdict: Verdict::Bad { repair }, found: crate::vm::chain(error) }
        }
    }
}

fn kvm(found: &Found) -> Check {
    let repair = match &found.kvm {
        Kvm::Works => return good("kvm", found.why()),
        Kvm::NotAllowed { .. } => Some("usermod -aG kvm $USER, then log in again".to_owned()),
        // Whether the processor or the machine's own host allows it is not for a command to change.
        Kvm::Missing | Kvm::Unusable { .. } => None,
    };
    let text = format!("{}; guests are emulated, which is slower", found.why());
    Check { name: "kvm", verdict: Verdict::Degraded { repair }, found: text }
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
    let tried = network::program().and_then(|program| {
        std::fs::create_dir_all(vm.data())
            .map_err(|source| network::Error::Open { path: vm.data().to_owned(), source })?;
        network::start(&program, &id, &vm)
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
    let missing = groups.not_enforced.iter().map(|limit| format!("{}: {}", limit.limit, limit.why));
    let text = format!(
        "the VMM alone limits its guest; not enforced besides: {}",
        missing.collect::<Vec<_>>().join("; ")
    );
    Check { name: "limits", verdict: Verdict::Degraded { repair: None }, found: text }
}

fn good(name: &'static str, found: String) -> Check {
    Check { name, verdict: Verdict::Good, found }
}
