//! What a node consists of, as pure functions: what it sees of the host, QEMU's arguments, its kernel's command line.

use std::net::Ipv4Addr;
use std::path::{Component, Path, PathBuf};

use imp_testkit_node::wire::PORT;

/// A node's place in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attachment {
    pub(super) tap: String,
    pub(super) mac: String,
    pub(super) address: Ipv4Addr,
    pub(super) prefix: u8,
    pub(super) gateway: Ipv4Addr,
}

/// Features of that processor which QEMU does not emulate, and would warn of.
const NOT_EMULATED: [&str; 9] = [
    "rdseed",
    "sha-ni",
    "fxsr-opt",
    "misalignsse",
    "3dnowprefetch",
    "osvw",
    "topoext",
    "nrip-save",
    "xsavec",
];

/// The machine that QEMU is to emulate.
#[derive(Debug, Clone)]
pub(super) struct Machine<'a> {
    pub(super) qemu: &'a Path,
    pub(super) kernel: &'a Path,
    pub(super) initramfs: &'a Path,
    pub(super) disk: &'a Path,
    pub(super) share_socket: &'a Path,
    pub(super) console: &'a Path,
    pub(super) memory_mib: u32,
    pub(super) hostname: &'a str,
    pub(super) attachment: Option<&'a Attachment>,
    /// Rate of the host's time stamp counter, which is the emulated one, too.
    pub(super) tsc_khz: Option<u64>,
}

impl Machine<'_> {
    /// One processor: KVM in the node patches running code, which emulated processors in several threads do not survive.
    pub(super) fn arguments(&self) -> Vec<String> {
        let memory = format!("{}M", self.memory_mib);
        let mut arguments = vec![self.qemu.display().to_string()];
        let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        option("-accel", "tcg,thread=single".to_owned());
        option("-machine", "q35,memory-backend=memory".to_owned());
        option("-cpu", format!("EPYC,+svm,+npt,-{}", NOT_EMULATED.join(",-")));
        option("-smp", "1".to_owned());
        option("-m", memory.clone());
        // virtiofsd reads and writes the node's memory itself.
        option("-object", format!("memory-backend-memfd,id=memory,size={memory},share=on"));
        option("-kernel", self.kernel.display().to_string());
        option("-initrd", self.initramfs.display().to_string());
        option("-append", self.command_line());
        option("-display", "none".to_owned());
        option("-serial", format!("file:{}", self.console.display()));
        option("-chardev", format!("socket,id=share,path={}", escaped(self.share_socket)));
        option("-device", "vhost-user-fs-pci,chardev=share,tag=host,queue-size=1024".to_owned());
        // The disk is as short-lived as the node: nothing in it is worth a flush.
        option(
            "-drive",
            format!("if=none,id=disk,format=raw,cache=unsafe,discard=unmap,file={}", escaped(self.disk)),
        );
        option("-device", "virtio-blk-pci,drive=disk".to_owned());
        // The channel is QEMU's standard input, so that nobody else can have its other end.
        option("-chardev", "socket,id=channel,fd=0".to_owned());
        option("-device", "virtio-serial-pci".to_owned());
        option("-device", format!("virtserialport,chardev=channel,name={PORT}"));
        option("-device", "virtio-rng-pci".to_owned());
        if let Some(Attachment { tap, mac, .. }) = self.attachment {
            option("-netdev", format!("tap,id=network,ifname={tap},script=no,downscript=no"));
            option("-device", format!("virtio-net-pci,netdev=network,mac={mac},romfile="));
        }
        arguments.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
        arguments
    }

    fn command_line(&self) -> String {
        let mut words = vec![
            "console=ttyS0".to_owned(),
            "quiet".to_owned(),
            "loglevel=4".to_owned(),
            "panic=-1".to_owned(),
            // Each of these saves an emulated processor some work.
            "mitigations=off".to_owned(),
            "nokaslr".to_owned(),
            "apparmor=0".to_owned(),
            "cryptomgr.notests".to_owned(),
            "tsc=reliable".to_owned(),
            "8250.nr_uarts=1".to_owned(),
        ];
        // What the kernel measures on emulated timers is wrong by up to a thousandth, and it corrects that later, perhaps when
        // KVM has taken note of it: see `tolerate_clocks` of the node's PID 1.
        words.extend(self.tsc_khz.map(|khz| format!("tsc_early_khz={khz}")));
        words.extend([
            // What is not for the kernel comes last: it would go to PID 1 as arguments or environment.
            "--".to_owned(),
            format!("imp.hostname={}", self.hostname),
        ]);
        if let Some(Attachment { address, prefix, gateway, .. }) = self.attachment {
            words.push(format!("imp.address={address}/{prefix}"));
            words.push(format!("imp.gateway={gateway}"));
        }
        words.join(" ")
    }
}

/// A value among QEMU's comma-separated options.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// `wanted` without what lies in another wanted directory, each once.
pub(super) fn outermost(wanted: &[PathBuf]) -> Vec<PathBuf> {
    let mut shares: Vec<PathBuf> = Vec::new();
    let mut sorted = wanted.to_vec();
    // A directory comes before what lies in it.
    sorted.sort();
    for path in sorted {
        if !shares.iter().any(|share| path.starts_with(share)) {
            shares.push(path);
        }
    }
    shares
}

/// Not what holds credentials: whole homes, the system's settings and state, and all that contains one of these.
pub(super) fn may_be_shared(path: &Path, home: Option<&Path>) -> bool {
    const PRIVATE: [&str; 7] = ["/root", "/home/*", "/etc/*", "/var/*", "/run/*", "/proc/*", "/sys/*"];
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let holds = |private: &Path| private.starts_with(path);
    // A directory in `/home` is somebody's home; single files and directories in `/etc` need not be secret.
    let somebodys = path.parent() == Some(Path::new("/home"));
    path.is_absolute()
        && plain
        && !somebodys
        && !home.is_some_and(holds)
        && !PRIVATE.iter().map(Path::new).any(holds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(paths: &[&str]) -> Vec<PathBuf> {
        paths.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn a_directory_in_a_shared_directory_is_not_shared_twice() {
        let wanted = paths(&["/usr/share/x", "/a/b", "/usr", "/a/bc", "/a/b"]);
        assert_eq!(outermost(&wanted), paths(&["/a/b", "/a/bc", "/usr"]));
    }

    #[test]
    fn the_root_and_homes_are_refused() {
        let home = Some(Path::new("/users/me"));
        for path in
            ["/", "/root", "/home", "/home/you", "/etc", "/users", "/users/me", "relative", "/usr/../root"]
        {
            assert!(!may_be_shared(Path::new(path), home), "{path}");
        }
        for path in
            ["/usr", "/home/you/imp/target", "/etc/alternatives", "/users/me/.cache/imp/lab", "/users/you"]
        {
            assert!(may_be_shared(Path::new(path), home), "{path}");
        }
    }

    fn machine(path: &Path) -> Machine<'_> {
        Machine {
            qemu: path,
            kernel: path,
            initramfs: path,
            disk: path,
            share_socket: path,
            console: path,
            memory_mib: 512,
            hostname: "node",
            attachment: None,
            tsc_khz: None,
        }
    }

    #[test]
    fn a_kernel_is_told_the_rate_of_its_clock_where_it_is_known() {
        let path = Path::new("/a");
        assert!(!machine(path).command_line().contains("tsc_early_khz"));
        let line = Machine { tsc_khz: Some(2_596_120), ..machine(path) }.command_line();
        assert!(line.contains(" tsc_early_khz=2596120 -- imp.hostname=node"), "{line}");
    }

    #[test]
    fn a_node_without_a_network_has_no_network_device() {
        let machine = machine(Path::new("/a,b"));
        let alone = machine.arguments().join(" ");
        assert!(!alone.contains("-netdev") && !alone.contains("imp.address"), "{alone}");
        assert!(alone.contains("file=/a,,b"), "{alone}");
        let attachment = Attachment {
            tap: "t2".to_owned(),
            mac: "52:54:00:00:00:02".to_owned(),
            address: Ipv4Addr::new(10, 99, 0, 2),
            prefix: 24,
            gateway: Ipv4Addr::new(10, 99, 0, 1),
        };
        let attached = Machine { attachment: Some(&attachment), ..machine }.arguments().join(" ");
        assert!(
            attached.contains("ifname=t2") && attached.contains("imp.address=10.99.0.2/24"),
            "{attached}"
        );
    }
}
