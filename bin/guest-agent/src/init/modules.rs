//! The kernel's modules in the initramfs: those that the machine needs before it can answer, those that may come while it
//! does, and those that only some images ever need.

use std::fs::{self, File};
use std::path::Path;

use crate::log;

/// Modules of every machine, in the order in which they must be loaded.
const LIST: &str = "/modules.list";
/// Where their files are in the initramfs, and in the root.
pub(super) const DIRECTORY: &str = "/modules";
pub(super) const IN_ROOT: &str = "/.imp/modules";
/// Modules of container tools, loaded at the kernel's first request for one of them: in the initramfs, then beside them.
const CONTAINERS: [&str; 2] = ["/containers.list", "/modules/containers.list"];
/// What the kernel executes when it misses a module: this program, `-q -- NAME`.
const REQUESTS: &str = "/proc/sys/kernel/modprobe";
const QUIET: &str = "-q";

/// Drivers that no answer to the host waits for. Who wants a network waits for its interface.
const LATE: [&str; 5] = ["failover", "net_failover", "virtio_net", "virtio_rng", "virtio_balloon"];
/// Drivers of the other kind of channel.
const VSOCK: [&str; 3] = ["vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"];
/// Beginnings of the names by which the kernel asks for modules of container tools: netfilter by module, family and
/// netlink protocol, network devices by kind, and /dev/net/tun.
const OF_CONTAINERS: [&str; 15] = [
    "br_netfilter",
    "bridge",
    "char-major-10-200",
    "ip6_tables",
    "ip6t",
    "ip_tables",
    "ipt",
    "net-pf-16-proto-12",
    "nf",
    "rtnl-link-",
    "tun",
    "veth",
    "vxlan",
    "x_tables",
    "xt_",
];

/// When the machine can do without a channel over vsock, its drivers come late too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vsock {
    Channel,
    Unused,
}

/// Modules that are loaded when the agent runs. The files are open, because they are out of sight by then.
#[derive(Debug)]
pub(super) struct Late(Vec<(String, File)>);

/// Loads what is needed now.
pub(super) fn load(vsock: Vsock) -> Late {
    let mut late = Vec::new();
    for path in listed(LIST) {
        let Ok(module) = File::open(&path) else {
            log::warn(format_args!("module {path} is not in the initramfs"));
            continue;
        };
        // The open file keeps the memory for as long as it is needed.
        let _ = fs::remove_file(&path);
        if is_late(&path, vsock) {
            late.push((path, module));
        } else {
            insert(&path, &module);
        }
    }
    let _ = fs::remove_file(LIST);
    // A kernel bundle without modules for containers has no such list.
    let _ = fs::rename(CONTAINERS[0], CONTAINERS[1]);
    if let Err(error) = fs::write(REQUESTS, super::root::AGENT) {
        log::warn(format_args!("{REQUESTS} not set: {error}"));
    }
    Late(late)
}

impl Late {
    pub(super) fn load(self) {
        for (path, module) in self.0 {
            insert(&path, &module);
        }
    }
}

/// Whether these words are the kernel's request for a module; if they are, it is served.
pub fn requested(words: &[String]) -> bool {
    let [quiet, .., name] = words else { return false };
    if quiet != QUIET {
        return false;
    }
    if of_containers(name) {
        let in_root = |path: &str| path.replacen(DIRECTORY, IN_ROOT, 1);
        let list = in_root(CONTAINERS[1]);
        let paths = listed(&list);
        // Before the first of them: it asks for others, and those come with this list.
        let _ = fs::remove_file(&list);
        for path in paths.iter().map(|path| in_root(path)) {
            if let Ok(module) = File::open(&path) {
                insert(&path, &module);
            }
            let _ = fs::remove_file(&path);
        }
    }
    true
}

fn insert(path: &str, module: &File) {
    match rustix::system::finit_module(module, c"", 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        // What needed it says so more clearly.
        Err(error) => log::warn(format_args!("module {path} not loaded: {error}")),
    }
}

fn listed(list: &str) -> Vec<String> {
    let text = fs::read_to_string(list).unwrap_or_default();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

fn is_late(path: &str, vsock: Vsock) -> bool {
    let name =
        Path::new(path).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().replace('-', "_");
    LATE.contains(&name.as_str()) || (vsock == Vsock::Unused && VSOCK.contains(&name.as_str()))
}

fn of_containers(name: &str) -> bool {
    OF_CONTAINERS.iter().any(|beginning| name.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_answer_needs_is_loaded_before_it() {
        let late = |path| is_late(path, Vsock::Unused);
        assert!(
            !late("/modules/virtio_mmio.ko")
                && !late("/modules/virtio_blk.ko")
                && !late("/modules/overlay.ko")
        );
        assert!(
            late("/modules/virtio_net.ko") && late("/modules/virtio-rng.ko") && late("/modules/vsock.ko")
        );
        assert!(!is_late("/modules/vsock.ko", Vsock::Channel));
    }

    #[test]
    fn a_request_for_a_module_that_containers_need_is_told_from_others() {
        for name in
            ["nf_tables", "nfnetlink-subsys-10", "ip_tables", "rtnl-link-veth", "char-major-10-200", "xt_nat"]
        {
            assert!(of_containers(name), "{name}");
        }
        for name in ["net-pf-10", "fs-xfs", "crypto-crc32c", "binfmt-464c", "net-pf-16-proto-16"] {
            assert!(!of_containers(name), "{name}");
        }
    }

    #[test]
    fn words_of_the_agent_are_no_request() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert!(!requested(&words(&[])));
        assert!(!requested(&words(&["serve", "port:3"])));
        assert!(requested(&words(&["-q", "--", "fs-xfs"])));
    }
}
