//! Templates, the VMs that are made of them, and forks, as the owner's socket carries them.

use std::num::NonZeroU16;
use std::time::Duration;

use imp_protocol::runtime as wire;
use imp_runtime::Digest;
use imp_runtime::spec::{
    Arguments, Child, Claim, Cpus, DiskSize, Environment, HostName, Identity, IpVersions, KernelChoice,
    Memory, WhenStopped,
};
use imp_runtime::template::{BuildStep, InitCommand, Probe, Readiness, TemplateSpec};

use super::program::{
    base_from_wire, base_to_wire, limits_from_wire, limits_to_wire, main_from_wire, main_to_wire,
    variables_to_wire, words_to_wire,
};
use super::{Error, nanoseconds, network, path_text, port_from_wire, port_to_wire, time};
use crate::report::{Suspended, Template};

pub(crate) fn template_to_wire(spec: &TemplateSpec) -> wire::TemplateSpec {
    wire::TemplateSpec {
        base: Some(base_to_wire(&spec.base)),
        cpus: spec.cpus.get(),
        memory_bytes: spec.memory.bytes(),
        scratch_bytes: spec.scratch.bytes(),
        main: Some(main_to_wire(&spec.main)),
        hostname: spec.hostname.as_str().to_owned(),
        network: network::mode_to_wire(spec.network).into(),
        limits: Some(limits_to_wire(&spec.limits)),
        kernel: match &spec.kernel {
            KernelChoice::Default => None,
            KernelChoice::Bundle(digest) => Some(wire::template_spec::Kernel::KernelBundle(digest.clone())),
            KernelChoice::File(path) => Some(wire::template_spec::Kernel::KernelFile(path_text(path))),
        },
        init: spec.init.iter().map(init_to_wire).collect(),
        ready: spec.ready.iter().map(readiness_to_wire).collect(),
    }
}

pub(crate) fn template_from_wire(spec: wire::TemplateSpec) -> Result<TemplateSpec, Error> {
    let network = network::mode_from_wire(spec.network());
    Ok(TemplateSpec {
        base: base_from_wire(spec.base.ok_or(Error::Field("base"))?),
        cpus: Cpus::new(spec.cpus)?,
        memory: Memory::from_bytes(spec.memory_bytes)?,
        scratch: DiskSize::from_bytes(spec.scratch_bytes)?,
        network,
        kernel: match spec.kernel {
            None => KernelChoice::Default,
            Some(wire::template_spec::Kernel::KernelBundle(digest)) => KernelChoice::Bundle(digest),
            Some(wire::template_spec::Kernel::KernelFile(path)) => KernelChoice::File(path.into()),
        },
        hostname: spec.hostname.parse()?,
        main: main_from_wire(spec.main.ok_or(Error::Field("main"))?)?,
        limits: limits_from_wire(spec.limits.unwrap_or_default()),
        init: spec.init.into_iter().map(init_from_wire).collect::<Result<_, _>>()?,
        ready: spec.ready.into_iter().map(readiness_from_wire).collect::<Result<_, _>>()?,
    })
}

fn init_to_wire(command: &InitCommand) -> wire::InitCommand {
    wire::InitCommand {
        arguments: words_to_wire(&command.arguments),
        at_most_milliseconds: milliseconds(command.at_most),
    }
}

fn init_from_wire(command: wire::InitCommand) -> Result<InitCommand, Error> {
    Ok(InitCommand {
        arguments: Arguments::new(command.arguments)?,
        at_most: Duration::from_millis(command.at_most_milliseconds),
    })
}

fn readiness_to_wire(readiness: &Readiness) -> wire::Readiness {
    use wire::readiness::{Command, Http, Probe as Wire};
    let probe = match &readiness.probe {
        Probe::Command(arguments) => Wire::Command(Command { arguments: words_to_wire(arguments) }),
        Probe::Port(port) => Wire::Port(port.get().into()),
        Probe::Http { port, path } => Wire::Http(Http { port: port.get().into(), path: path.clone() }),
        Probe::Log(text) => Wire::Log(text.clone()),
    };
    wire::Readiness { probe: Some(probe), at_most_milliseconds: milliseconds(readiness.at_most) }
}

fn readiness_from_wire(readiness: wire::Readiness) -> Result<Readiness, Error> {
    use wire::readiness::Probe as Wire;
    let port =
        |port: u32| u16::try_from(port).ok().and_then(NonZeroU16::new).ok_or(Error::Field("ready.port"));
    let probe = match readiness.probe.ok_or(Error::Field("ready.probe"))? {
        Wire::Command(command) => Probe::Command(Arguments::new(command.arguments)?),
        Wire::Port(number) => Probe::Port(port(number)?),
        Wire::Http(http) => Probe::Http { port: port(http.port)?, path: http.path },
        Wire::Log(text) => Probe::Log(text),
    };
    Ok(Readiness { probe, at_most: Duration::from_millis(readiness.at_most_milliseconds) })
}

pub(crate) fn step_to_wire(step: &BuildStep) -> wire::BuildStep {
    use wire::build_step::Kind;
    let (kind, ready) = match step {
        BuildStep::Boot => (Kind::Boot, None),
        BuildStep::Ready(readiness) => (Kind::Ready, Some(readiness_to_wire(readiness))),
        BuildStep::Snapshot => (Kind::Snapshot, None),
        BuildStep::Keep => (Kind::Keep, None),
    };
    wire::BuildStep { kind: kind.into(), ready }
}

pub(crate) fn step_from_wire(step: wire::BuildStep) -> Result<BuildStep, Error> {
    use wire::build_step::Kind;
    Ok(match step.kind() {
        Kind::Boot => BuildStep::Boot,
        Kind::Ready => BuildStep::Ready(readiness_from_wire(step.ready.ok_or(Error::Field("ready"))?)?),
        Kind::Snapshot => BuildStep::Snapshot,
        Kind::Keep => BuildStep::Keep,
    })
}

pub(crate) fn listed_to_wire(
    template: imp_runtime::template::Template,
    names: Vec<String>,
) -> wire::Template {
    let of_vm = |owner: &String| imp_runtime::pins::vm_of(owner).map(|id| id.to_string());
    wire::Template {
        names,
        snapshot: template.snapshot.to_string(),
        template: template.template.map(|digest| digest.to_string()).unwrap_or_default(),
        image: template.image,
        command: template.command,
        vmm: template.vmm,
        cpus: template.cpus.get(),
        memory_bytes: template.memory.bytes(),
        scratch_bytes: template.scratch.bytes(),
        bytes: template.bytes,
        made_unix_nanoseconds: nanoseconds(template.made),
        last_used_unix_nanoseconds: nanoseconds(template.last_used),
        used_by: template
            .pinned_by
            .iter()
            .map(|owner| of_vm(owner).unwrap_or_else(|| owner.clone()))
            .collect(),
    }
}

pub(crate) fn listed_from_wire(template: wire::Template) -> Result<Template, Error> {
    Ok(Template {
        snapshot: digest_from_wire(&template.snapshot)?,
        template: match template.template.as_str() {
            "" => None,
            text => Some(digest_from_wire(text)?),
        },
        names: template.names,
        image: template.image,
        command: template.command,
        vmm: template.vmm,
        cpus: template.cpus,
        memory_bytes: template.memory_bytes,
        scratch_bytes: template.scratch_bytes,
        bytes: template.bytes,
        made: time(template.made_unix_nanoseconds),
        last_used: time(template.last_used_unix_nanoseconds),
        used_by: template.used_by,
    })
}

pub(crate) fn suspended_to_wire(suspended: imp_runtime::Suspended) -> wire::Suspended {
    wire::Suspended {
        name: suspended.name.to_string(),
        snapshot: suspended.snapshot.to_string(),
        image: suspended.image,
        memory_bytes: suspended.memory.bytes(),
        bytes: suspended.bytes,
        since_unix_nanoseconds: nanoseconds(suspended.since),
    }
}

pub(crate) fn suspended_from_wire(suspended: wire::Suspended) -> Result<Suspended, Error> {
    Ok(Suspended {
        snapshot: digest_from_wire(&suspended.snapshot)?,
        name: suspended.name,
        image: suspended.image,
        memory_bytes: suspended.memory_bytes,
        bytes: suspended.bytes,
        since: time(suspended.since_unix_nanoseconds),
    })
}

pub(crate) fn digest_from_wire(text: &str) -> Result<Digest, Error> {
    text.parse().map_err(|_| Error::Digest(text.chars().take(100).collect()))
}

pub(crate) fn child_to_wire(child: &Child) -> wire::Child {
    wire::Child {
        name: child.name.as_str().to_owned(),
        hostname: child.hostname.as_ref().map(|name| name.as_str().to_owned()).unwrap_or_default(),
        labels: child.labels.clone().into_iter().collect(),
        ports: child.ports.iter().map(port_to_wire).collect(),
        egress: child.bridge.egress.as_ref().map(network::egress_to_wire),
        ipv6: child.bridge.versions == IpVersions::Both,
        remove_when_stopped: child.when_stopped == WhenStopped::Remove,
    }
}

pub(crate) fn child_from_wire(child: wire::Child) -> Result<Child, Error> {
    Ok(Child {
        name: child.name.parse()?,
        hostname: hostname_from_wire(&child.hostname)?,
        labels: child.labels.into_iter().collect(),
        ports: child.ports.into_iter().map(port_from_wire).collect::<Result<_, _>>()?,
        bridge: network::wishes_from_wire(child.egress, child.ipv6)?,
        when_stopped: if child.remove_when_stopped { WhenStopped::Remove } else { WhenStopped::Keep },
    })
}

pub(crate) fn claim_to_wire(claim: &Claim) -> wire::Claim {
    wire::Claim {
        name: claim.name.as_ref().map(|name| name.as_str().to_owned()).unwrap_or_default(),
        labels: claim.labels.clone().into_iter().collect(),
        ports: claim.ports.iter().map(port_to_wire).collect(),
        remove_when_stopped: claim.when_stopped.map(|when| when == WhenStopped::Remove),
    }
}

pub(crate) fn claim_from_wire(claim: wire::Claim) -> Result<Claim, Error> {
    let when = |remove| if remove { WhenStopped::Remove } else { WhenStopped::Keep };
    Ok(Claim {
        name: if claim.name.is_empty() { None } else { Some(claim.name.parse()?) },
        labels: claim.labels.into_iter().collect(),
        ports: claim.ports.into_iter().map(port_from_wire).collect::<Result<_, _>>()?,
        when_stopped: claim.remove_when_stopped.map(when),
    })
}

pub(crate) fn identity_to_wire(identity: &Identity) -> wire::Identity {
    wire::Identity {
        hostname: identity.hostname.as_ref().map(|name| name.as_str().to_owned()).unwrap_or_default(),
        environment: variables_to_wire(&identity.environment),
        secrets: variables_to_wire(&identity.secrets),
    }
}

pub(crate) fn identity_from_wire(identity: Option<wire::Identity>) -> Result<Identity, Error> {
    let identity = identity.unwrap_or_default();
    Ok(Identity {
        hostname: hostname_from_wire(&identity.hostname)?,
        environment: Environment::new(identity.environment)?,
        secrets: Environment::new(identity.secrets)?,
    })
}

fn hostname_from_wire(text: &str) -> Result<Option<HostName>, Error> {
    Ok(if text.is_empty() { None } else { Some(text.parse()?) })
}

fn milliseconds(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use imp_runtime::spec::{BaseDisk, Bytes, Limits, MainProcess, NetworkMode, Stdin};

    use super::*;

    fn template() -> TemplateSpec {
        let words = |words: &[&str]| Arguments::new(words.iter().copied()).unwrap();
        let port = NonZeroU16::new(80).unwrap();
        let ready = |probe| Readiness { probe, at_most: Duration::from_millis(1500) };
        TemplateSpec {
            base: BaseDisk { image: "debian:12".into(), key: "sha256:00".into(), path: "/d/base".into() },
            cpus: Cpus::new(3).unwrap(),
            memory: "512m".parse().unwrap(),
            scratch: "2g".parse().unwrap(),
            network: Some(NetworkMode::Bridge),
            kernel: KernelChoice::Bundle("sha256:11".into()),
            hostname: "h".parse().unwrap(),
            main: MainProcess {
                arguments: words(&["serve", "-x"]),
                environment: Environment::new(["TOKEN=hunter2"]).unwrap(),
                user: "1:2".into(),
                working_directory: Bytes::new("/w").unwrap(),
                terminal: None,
                stdin: Stdin::Attached,
                stop_signal: "SIGINT".into(),
                open_files: Some(9),
            },
            limits: Limits { processes: Some(1), cpu_millis: Some(2), ..Limits::default() },
            init: vec![InitCommand {
                arguments: words(&["sh", "-c", "a b"]),
                at_most: Duration::from_secs(9),
            }],
            ready: vec![
                ready(Probe::Log("up".into())),
                ready(Probe::Port(port)),
                ready(Probe::Http { port, path: "/live".into() }),
                ready(Probe::Command(words(&["true"]))),
            ],
        }
    }

    #[test]
    fn a_template_crosses_the_wire_unchanged() {
        let there = template_from_wire(template_to_wire(&template())).unwrap();
        assert_eq!(format!("{there:?}"), format!("{:?}", template()));
        assert_eq!(there.main.environment.expose(), template().main.environment.expose());
    }

    #[test]
    fn a_template_that_lacks_something_is_refused() {
        let breakages: [fn(&mut wire::TemplateSpec); 5] = [
            |spec| spec.base = None,
            |spec| spec.main = None,
            |spec| spec.cpus = 0,
            |spec| spec.ready = vec![wire::Readiness::default()],
            |spec| spec.init = vec![wire::InitCommand::default()],
        ];
        for (number, breakage) in breakages.into_iter().enumerate() {
            let mut spec = template_to_wire(&template());
            breakage(&mut spec);
            assert!(template_from_wire(spec).is_err(), "breakage {number}");
        }
    }

    #[test]
    fn a_child_and_who_it_becomes_cross_the_wire_unchanged() {
        let mut child = Child::named("web".parse().unwrap());
        child.hostname = Some("host".parse().unwrap());
        child.labels = [("a".to_owned(), "b".to_owned())].into();
        child.when_stopped = WhenStopped::Remove;
        let there = child_from_wire(child_to_wire(&child)).unwrap();
        assert_eq!(format!("{there:?}"), format!("{child:?}"));
        let mut claim = Claim { name: Some("mine".parse().unwrap()), ..Claim::default() };
        for when_stopped in [None, Some(WhenStopped::Keep), Some(WhenStopped::Remove)] {
            claim.when_stopped = when_stopped;
            let there = claim_from_wire(claim_to_wire(&claim)).unwrap();
            assert_eq!(format!("{there:?}"), format!("{claim:?}"));
        }
        let identity = Identity {
            hostname: None,
            environment: Environment::new(["A=1"]).unwrap(),
            secrets: Environment::new(["TOKEN=hunter2"]).unwrap(),
        };
        let there = identity_from_wire(Some(identity_to_wire(&identity))).unwrap();
        assert_eq!(there.hostname, None);
        assert_eq!(there.environment.expose(), identity.environment.expose());
        assert_eq!(there.secrets.expose(), identity.secrets.expose());
    }

    #[test]
    fn a_step_crosses_the_wire_unchanged() {
        let ready = template().ready.into_iter().map(BuildStep::Ready);
        for step in [BuildStep::Boot, BuildStep::Snapshot, BuildStep::Keep].into_iter().chain(ready) {
            assert_eq!(step_from_wire(step_to_wire(&step)).unwrap(), step);
        }
    }
}
