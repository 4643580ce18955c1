//! From the flags of `imp run` and what an image says of itself to the VM that is asked for. No I/O: what depends on
//! the machine is an argument.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use imp_protocol::signal;
use imp_runtime::spec::{
    Arguments, Balloon, BaseDisk, BridgeWishes, Bytes, CopiedMount, Cpus, DiskSize, Egress, Environment,
    HostName, IpVersions, KernelChoice, Limits, MainProcess, Memory, NetworkMode, NotASize, Otherwise, Stdin,
    Terminal, VmName, VmSpec, WhenStopped,
};
use imp_storage::image::config::ImageConfig;

use super::flags::{EgressDefault, Machine, Network, Run};
use crate::settings::RunDefaults;
use crate::value;

/// Search path of programs in images that name none.
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const DEFAULT_CPU_MILLIS: u32 = 1000;
const DEFAULT_MEMORY: u64 = 256 << 20;
const DEFAULT_DISK: u64 = 10 << 30;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the image names no program: say which to run, as in `imp run {image} COMMAND`")]
    NoProgram { image: String },
    #[error("{0:?} is not an absolute path: write the working directory with a leading '/'")]
    RelativeWorkdir(String),
    #[error("{0:?} is not a label: write KEY=VALUE")]
    Label(String),
    #[error("the image's stop signal; say another one with --stop-signal")]
    ImageStopSignal(#[source] signal::Unknown),
    #[error("in the settings file, run.{name} = {value:?}")]
    Setting {
        name: &'static str,
        value: String,
        #[source]
        source: value::Error,
    },
    #[error("in the settings file, run.network = {0:?}: write bridge, user or none")]
    NetworkSetting(String),
    #[error(transparent)]
    Size(#[from] NotASize),
    #[error(transparent)]
    Spec(#[from] imp_runtime::spec::Error),
}

/// What the decision needs besides flags and image.
pub(crate) struct World<'a> {
    pub(crate) defaults: &'a RunDefaults,
    pub(crate) base: BaseDisk,
    /// A name nobody has, for a VM that is given none.
    pub(crate) made_up_name: String,
    /// Variables from `--env-file`, in order.
    pub(crate) env_files: Vec<OsString>,
    /// Looks a variable up in this command's environment.
    pub(crate) host_env: &'a dyn Fn(&OsStr) -> Option<OsString>,
    /// With absolute sources.
    pub(crate) mounts: Vec<CopiedMount>,
    /// The window that the program's terminal starts with.
    pub(crate) terminal: Option<Terminal>,
}

pub(crate) fn spec(run: &Run, image: &ImageConfig, world: World<'_>) -> Result<VmSpec, Error> {
    let name: VmName = run.name.clone().unwrap_or_else(|| world.made_up_name.clone()).parse()?;
    let (machine, defaults) = (&run.machine, world.defaults);
    let hostname = match &run.hostname {
        Some(hostname) => hostname.parse()?,
        None => hostname_of(&name)?,
    };
    let Size { cpu_millis, memory, scratch } = size(machine, defaults)?;
    let wanted = Wanted {
        machine,
        variables: &run.variables.env,
        command: command(&run.image_and_command),
        stdin: if run.interactive { Stdin::Attached } else { Stdin::Null },
        terminal: run.tty.then(|| world.terminal.clone().unwrap_or_else(no_window)),
    };
    Ok(VmSpec {
        main: main_process(&wanted, image, &hostname, &world)?,
        name,
        base: world.base,
        cpus: Cpus::new(cpu_millis.div_ceil(1000))?,
        memory,
        scratch,
        hostname,
        network: if run.network_is_implied() { None } else { network(machine, defaults)? },
        bridge: bridge(run),
        ports: run.publish.iter().map(|port| port.0).collect(),
        mounts: world.mounts,
        labels: labels(&image.labels, &run.labels)?,
        limits: limits(machine, cpu_millis),
        stop_grace: run.stop_timeout,
        kernel: kernel(machine, defaults),
        balloon: if run.balloon { Balloon::With } else { Balloon::Without },
        when_stopped: if run.rm { WhenStopped::Remove } else { WhenStopped::Keep },
    })
}

/// The program that a user wants.
pub(crate) struct Wanted<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) variables: &'a [OsString],
    /// In the place of the image's CMD.
    pub(crate) command: &'a [OsString],
    pub(crate) stdin: Stdin,
    pub(crate) terminal: Option<Terminal>,
}

pub(crate) fn main_process(
    wanted: &Wanted<'_>,
    image: &ImageConfig,
    hostname: &HostName,
    world: &World<'_>,
) -> Result<MainProcess, Error> {
    let machine = wanted.machine;
    let no_program = || Error::NoProgram { image: world.base.image.clone() };
    let environment = environment(wanted.variables, image, hostname, &world.env_files, world.host_env)?;
    Ok(MainProcess {
        arguments: Arguments::new(arguments(wanted, image).ok_or_else(no_program)?)?,
        environment,
        user: machine.user.clone().unwrap_or_else(|| image.user.clone()),
        working_directory: Bytes::new(working_directory(machine, image)?)?,
        terminal: wanted.terminal.clone(),
        stdin: wanted.stdin,
        stop_signal: stop_signal(machine, image)?,
        open_files: machine.ulimits.last().map(|limit| limit.open_files),
    })
}

/// How large a machine is.
pub(crate) struct Size {
    /// Thousandths of a processor.
    pub(crate) cpu_millis: u32,
    pub(crate) memory: Memory,
    pub(crate) scratch: DiskSize,
}

pub(crate) fn size(machine: &Machine, defaults: &RunDefaults) -> Result<Size, Error> {
    let cpu_millis = match machine.cpus {
        Some(millis) => millis,
        None => setting("cpus", &defaults.cpus, value::cpu_millis)?.unwrap_or(DEFAULT_CPU_MILLIS),
    };
    let memory = match machine.memory {
        Some(memory) => memory,
        None => {
            Memory::from_bytes(setting("memory", &defaults.memory, value::bytes)?.unwrap_or(DEFAULT_MEMORY))?
        }
    };
    let scratch = match machine.disk {
        Some(disk) => disk,
        None => DiskSize::from_bytes(setting("disk", &defaults.disk, value::bytes)?.unwrap_or(DEFAULT_DISK))?,
    };
    Ok(Size { cpu_millis, memory, scratch })
}

pub(crate) fn limits(machine: &Machine, cpu_millis: u32) -> Limits {
    let number = |limit: i64| u32::try_from(limit).ok();
    Limits {
        processes: machine.pids_limit.and_then(number).filter(|limit| *limit > 0),
        // Whole processors limit themselves.
        cpu_millis: (!cpu_millis.is_multiple_of(1000)).then_some(cpu_millis),
        disk_bytes_per_second: machine.disk_bps.filter(|limit| *limit > 0),
        disk_requests_per_second: machine.disk_iops.filter(|limit| *limit > 0),
        network_bytes_per_second: machine.network_bps.filter(|limit| *limit > 0),
        network_packets_per_second: machine.network_pps.filter(|limit| *limit > 0),
    }
}

fn setting<T>(
    name: &'static str,
    text: &Option<String>,
    parse: fn(&str) -> Result<T, value::Error>,
) -> Result<Option<T>, Error> {
    let Some(text) = text else { return Ok(None) };
    parse(text).map(Some).map_err(|source| Error::Setting { name, value: text.clone(), source })
}

/// As docker merges them: an entry point by flag drops the image's CMD with its ENTRYPOINT.
fn arguments(wanted: &Wanted<'_>, image: &ImageConfig) -> Option<Vec<Vec<u8>>> {
    let bytes = |words: &[String]| words.iter().map(|word| word.clone().into_bytes()).collect::<Vec<_>>();
    let command: Vec<Vec<u8>> = wanted.command.iter().map(|word| word.as_bytes().to_vec()).collect();
    let (mut arguments, rest) = match &wanted.machine.entrypoint {
        Some(program) if program.is_empty() => (Vec::new(), command),
        Some(program) => (vec![program.clone().into_bytes()], command),
        None if command.is_empty() => (bytes(&image.entrypoint), bytes(&image.cmd)),
        None => (bytes(&image.entrypoint), command),
    };
    arguments.extend(rest);
    (!arguments.is_empty()).then_some(arguments)
}

/// What follows the image, without the `--` that may stand between.
pub(crate) fn command(image_and_command: &[OsString]) -> &[OsString] {
    match image_and_command.get(1..).unwrap_or_default() {
        [dashes, command @ ..] if dashes == "--" => command,
        command => command,
    }
}

/// Later ones win: the image's, those of files, those of flags. A bare name takes the value from here or takes the
/// variable away.
fn environment(
    flags: &[OsString],
    image: &ImageConfig,
    hostname: &HostName,
    files: &[OsString],
    host: &dyn Fn(&OsStr) -> Option<OsString>,
) -> Result<Environment, Error> {
    let mut variables: Vec<Vec<u8>> = vec![DEFAULT_PATH.into(), format!("HOSTNAME={hostname}").into_bytes()];
    // An image may hold anything there: what is no variable is nobody's.
    for variable in image.env.iter().filter(|variable| Environment::new([variable.as_str()]).is_ok()) {
        replace(&mut variables, variable.clone().into_bytes());
    }
    for variable in files.iter().chain(flags) {
        if variable.as_bytes().contains(&b'=') {
            replace(&mut variables, variable.as_bytes().to_vec());
        } else if let Some(value) = host(variable) {
            let mut whole = variable.as_bytes().to_vec();
            whole.push(b'=');
            whole.extend(value.into_vec());
            replace(&mut variables, whole);
        } else {
            variables.retain(|known| name_of(known) != variable.as_bytes());
        }
    }
    Ok(Environment::new(variables)?)
}

fn replace(variables: &mut Vec<Vec<u8>>, variable: Vec<u8>) {
    match variables.iter_mut().find(|known| name_of(known) == name_of(&variable)) {
        Some(known) => *known = variable,
        None => variables.push(variable),
    }
}

fn name_of(variable: &[u8]) -> &[u8] {
    variable.split(|byte| *byte == b'=').next().unwrap_or_default()
}

fn working_directory(machine: &Machine, image: &ImageConfig) -> Result<String, Error> {
    match &machine.workdir {
        None => Ok(image.working_dir.clone()),
        Some(directory) if Path::new(directory).is_absolute() => Ok(directory.clone()),
        Some(directory) => Err(Error::RelativeWorkdir(directory.clone())),
    }
}

/// Empty: the agent's default. An image's is checked here, where nothing has been started for it yet.
fn stop_signal(machine: &Machine, image: &ImageConfig) -> Result<String, Error> {
    match &machine.stop_signal {
        Some(signal) => Ok(signal.clone()),
        None if image.stop_signal.is_empty() => Ok(String::new()),
        None => {
            let signal = &image.stop_signal;
            signal::number(signal).map_err(Error::ImageStopSignal).map(|_| signal.clone())
        }
    }
}

/// A terminal that nobody looks at.
fn no_window() -> Terminal {
    Terminal { rows: 24, columns: 80, term: String::new() }
}

impl Run {
    /// Other flags imply a network, and win over the settings file.
    fn network_is_implied(&self) -> bool {
        self.machine.network.is_none() && !bridge(self).is_none()
    }
}

/// Absent: what the driver does best.
pub(crate) fn network(machine: &Machine, defaults: &RunDefaults) -> Result<Option<NetworkMode>, Error> {
    Ok(match (machine.network, defaults.network.as_deref()) {
        (Some(Network::Bridge), _) | (None, Some("bridge")) => Some(NetworkMode::Bridge),
        (Some(Network::User), _) | (None, Some("user")) => Some(NetworkMode::User),
        (Some(Network::None), _) | (None, Some("none")) => Some(NetworkMode::None),
        (None, None) => None,
        (None, Some(other)) => return Err(Error::NetworkSetting(other.to_owned())),
    })
}

/// What is allowed by name is allowed alone, unless that is said to be otherwise.
pub(crate) fn bridge(run: &Run) -> BridgeWishes {
    let otherwise = match run.egress {
        Some(EgressDefault::Allow) => Some(Otherwise::Allow),
        Some(EgressDefault::Deny) => Some(Otherwise::Refuse),
        None if !run.allow.is_empty() => Some(Otherwise::Refuse),
        None => (!run.deny.is_empty()).then_some(Otherwise::Allow),
    };
    let egress = otherwise.map(|otherwise| Egress {
        otherwise,
        refuse: run.deny.iter().map(|denied| denied.0.network()).collect(),
        allow: run.allow.clone(),
    });
    let versions = if run.ipv6 { IpVersions::Both } else { IpVersions::Ipv4 };
    BridgeWishes { egress, versions }
}

/// Those of flags win.
pub(crate) fn labels(
    of_image: &BTreeMap<String, String>,
    of_flags: &[String],
) -> Result<BTreeMap<String, String>, Error> {
    let mut labels = of_image.clone();
    for label in of_flags {
        let (key, value) = label.split_once('=').unwrap_or((label, ""));
        if key.is_empty() {
            return Err(Error::Label(label.clone()));
        }
        labels.insert(key.to_owned(), value.to_owned());
    }
    Ok(labels)
}

pub(crate) fn kernel(machine: &Machine, defaults: &RunDefaults) -> KernelChoice {
    match machine.kernel.as_ref().or(defaults.kernel.as_ref()) {
        None => KernelChoice::Default,
        Some(text) if text.starts_with("sha256:") => KernelChoice::Bundle(text.clone()),
        Some(text) => KernelChoice::File(text.into()),
    }
}

/// Names of VMs may have letters that host names may not.
fn hostname_of(name: &VmName) -> Result<HostName, imp_runtime::spec::Error> {
    let allowed = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    name.as_str().chars().map(allowed).collect::<String>().trim_matches('-').parse()
}
