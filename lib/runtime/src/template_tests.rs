use std::path::PathBuf;

use imp_storage::snapshots::manifest::{Cpu, Vmm};

use super::*;
use crate::spec::{Bytes, Environment, Stdin};

fn spec() -> TemplateSpec {
    TemplateSpec {
        base: BaseDisk { image: "busybox".into(), key: "sha256:ab".into(), path: "/disk".into() },
        cpus: Cpus::new(1).unwrap(),
        memory: Memory::from_bytes(128 << 20).unwrap(),
        scratch: DiskSize::from_bytes(64 << 20).unwrap(),
        network: None,
        kernel: KernelChoice::Default,
        hostname: "guest".parse().unwrap(),
        main: MainProcess {
            arguments: Arguments::new(["sleep", "1000"]).unwrap(),
            environment: Environment::new(["A=b"]).unwrap(),
            user: String::new(),
            working_directory: Bytes::default(),
            terminal: None,
            stdin: Stdin::Null,
            stop_signal: String::new(),
            open_files: None,
        },
        limits: Limits::default(),
        init: vec![InitCommand {
            arguments: Arguments::new(["true"]).unwrap(),
            at_most: Duration::from_secs(1),
        }],
        ready: vec![Readiness { probe: Probe::Log("up".into()), at_most: Duration::from_secs(1) }],
    }
}

fn host() -> HostFacts {
    let cpu = Cpu { vendor: "v".into(), model: "m".into(), features: Digest::of(b"f") };
    let vmm = Vmm { name: "firecracker".into(), version: "1.12.1".into() };
    let (kernel, initramfs) = (Digest::of(b"kernel"), Digest::of(b"initramfs"));
    HostFacts { kernel, initramfs, vmm, cpu, network: NetworkMode::None }
}

#[test]
fn what_reaches_the_guest_changes_the_digest() {
    let made = digest(&spec(), &host()).unwrap();
    assert_eq!(digest(&spec(), &host()).unwrap(), made);
    let changes: Vec<fn(&mut TemplateSpec)> = vec![
        |spec| spec.base.key = "sha256:cd".into(),
        |spec| spec.cpus = Cpus::new(2).unwrap(),
        |spec| spec.memory = Memory::from_bytes(256 << 20).unwrap(),
        |spec| spec.scratch = DiskSize::from_bytes(128 << 20).unwrap(),
        |spec| spec.hostname = "other".parse().unwrap(),
        |spec| spec.main.arguments = Arguments::new(["sleep", "1001"]).unwrap(),
        |spec| spec.main.environment = Environment::new(["A=c"]).unwrap(),
        |spec| spec.main.user = "1".into(),
        |spec| spec.main.working_directory = Bytes::new("/tmp").unwrap(),
        |spec| spec.main.stdin = Stdin::Attached,
        |spec| spec.limits.processes = Some(10),
        |spec| spec.init.clear(),
        |spec| spec.init.push(spec.init[0].clone()),
        |spec| spec.ready.clear(),
        |spec| spec.ready[0].probe = Probe::Log("down".into()),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut changed = spec();
        change(&mut changed);
        assert_ne!(digest(&changed, &host()).unwrap(), made, "change {at} of the template");
    }
    let changes: Vec<fn(&mut HostFacts)> = vec![
        |host| host.kernel = Digest::of(b"newer"),
        |host| host.initramfs = Digest::of(b"newer"),
        |host| host.vmm.version = "1.13.0".into(),
        |host| host.vmm.name = "qemu".into(),
        |host| host.cpu.model = "n".into(),
        |host| host.cpu.features = Digest::of(b"g"),
        |host| host.network = NetworkMode::Bridge,
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut changed = host();
        change(&mut changed);
        assert_ne!(digest(&spec(), &changed).unwrap(), made, "change {at} of the host");
    }
}

#[test]
fn what_does_not_reach_the_guest_makes_no_other_template() {
    let made = digest(&spec(), &host()).unwrap();
    let changes: Vec<fn(&mut TemplateSpec)> = vec![
        // By another name, or from another place, it is the same disk.
        |spec| spec.base.image = "docker.example/busybox".into(),
        |spec| spec.base.path = PathBuf::from("/elsewhere"),
        // What they lead to counts.
        |spec| spec.kernel = KernelChoice::Bundle("kernel".into()),
        |spec| spec.network = Some(NetworkMode::None),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut changed = spec();
        change(&mut changed);
        assert_eq!(digest(&changed, &host()).unwrap(), made, "change {at}");
    }
}
