//! Limits of a whole VM by control groups, version 1 or 2, as far as the host lets this process make them; what it does
//! not let is reported.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::id::VmId;
use crate::status::{EnforcedLimit, NotEnforced};

/// Period over which processor time is measured out, in microseconds.
const CPU_PERIOD: u64 = 100_000;
/// Name of the group that holds all VMs' groups.
const ALL: &str = "imp";
/// Beside those of VMs: the group that pays for what they share.
const SHARED: &str = "shared";

/// What is asked for one VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub memory_bytes: u64,
    /// Thousandths of a processor.
    pub cpu_millis: u64,
    pub threads: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Controller {
    Memory,
    Cpu,
    Pids,
}

impl Controller {
    const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
        }
    }

    fn settings(self, version: Version, limits: &Limits) -> Vec<(&'static str, String)> {
        let quota = (limits.cpu_millis * CPU_PERIOD / 1000).max(1000);
        match (self, version) {
            (Self::Memory, Version::One) => vec![("memory.limit_in_bytes", limits.memory_bytes.to_string())],
            (Self::Memory, Version::Two) => vec![("memory.max", limits.memory_bytes.to_string())],
            (Self::Cpu, Version::One) => {
                vec![("cpu.cfs_period_us", CPU_PERIOD.to_string()), ("cpu.cfs_quota_us", quota.to_string())]
            }
            (Self::Cpu, Version::Two) => vec![("cpu.max", format!("{quota} {CPU_PERIOD}"))],
            (Self::Pids, _) => vec![("pids.max", limits.threads.to_string())],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A hierarchy that is mounted and this process's own group in it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    version: Version,
    mount: PathBuf,
    own: PathBuf,
}

/// The groups of one VM, and what could not be had.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    pub directories: Vec<PathBuf>,
    pub enforced: Vec<EnforcedLimit>,
    pub not_enforced: Vec<NotEnforced>,
}

/// Directories that [`make`] may make for this VM: recorded before they exist.
pub(crate) fn planned(id: &VmId) -> Vec<PathBuf> {
    let system = System::read();
    let mut directories: Vec<PathBuf> =
        Controller::ALL.iter().filter_map(|c| system.find(*c)).map(|h| h.group(id)).collect();
    directories.sort();
    directories.dedup();
    directories
}

/// Makes the groups and sets their limits.
pub(crate) fn make(id: &VmId, limits: &Limits) -> Groups {
    let system = System::read();
    let mut groups = Groups::default();
    for controller in Controller::ALL {
        match limit(&system, controller, id, limits) {
            Ok((directory, enforced)) => {
                groups.enforced.extend(enforced);
                if !groups.directories.contains(&directory) {
                    groups.directories.push(directory);
                }
            }
            Err(why) => {
                groups
                    .not_enforced
                    .push(NotEnforced { limit: controller.name().into(), why: why.to_string() });
            }
        }
    }
    groups
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the host has no control group hierarchy for it")]
    NoHierarchy,
    #[error("{} cannot be made: {source}", path.display())]
    Make { path: PathBuf, source: io::Error },
    #[error("{} cannot be written: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

fn limit(
    system: &System,
    controller: Controller,
    id: &VmId,
    limits: &Limits,
) -> Result<(PathBuf, Vec<EnforcedLimit>), Error> {
    let hierarchy = system.find(controller).ok_or(Error::NoHierarchy)?;
    let group = make_group(hierarchy, controller, id.as_str())?;
    let mut enforced = Vec::new();
    for (file, value) in controller.settings(hierarchy.version, limits) {
        let path = group.join(file);
        write(&path, &value)?;
        enforced.push(EnforcedLimit { path, value });
    }
    Ok((group, enforced))
}

/// The group that pays for memory that VMs share. It has no limit: what is in it is given back when others need memory.
pub(crate) fn shared_memory() -> Result<PathBuf, Error> {
    let system = System::read();
    let hierarchy = system.find(Controller::Memory).ok_or(Error::NoHierarchy)?;
    make_group(hierarchy, Controller::Memory, SHARED)
}

/// The group of this name, made if it is not there.
fn make_group(hierarchy: &Hierarchy, controller: Controller, name: &str) -> Result<PathBuf, Error> {
    let parent = hierarchy.parent();
    let group = parent.join(name);
    let make = |path: &Path| match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::Make { path: path.to_owned(), source: error })
        }
        _ => Ok(()),
    };
    make(&parent)?;
    if hierarchy.version == Version::Two {
        for above in [parent.parent().unwrap_or(&hierarchy.mount), &parent] {
            write(&above.join("cgroup.subtree_control"), &format!("+{}", controller.name()))?;
        }
    }
    make(&group)?;
    Ok(group)
}

/// Puts a process, with all threads that it has and will have, into the groups.
pub(crate) fn enter(directories: &[PathBuf], pid: u32) -> Vec<NotEnforced> {
    let enter = |directory: &PathBuf| {
        let error = write(&directory.join("cgroup.procs"), &pid.to_string()).err()?;
        Some(NotEnforced { limit: directory.display().to_string(), why: error.to_string() })
    };
    directories.iter().filter_map(enter).collect()
}

/// The limit of the groups' memory if a process was killed because of it.
pub(crate) fn killed_at_memory_limit(directories: &[PathBuf]) -> Option<u64> {
    let read = |path: PathBuf| fs::read_to_string(path).ok();
    directories.iter().find_map(|group| {
        let (events, limit) = match read(group.join("memory.events")) {
            Some(events) => (events, "memory.max"),
            None => (read(group.join("memory.oom_control"))?, "memory.limit_in_bytes"),
        };
        (kills(&events) > 0).then(|| read(group.join(limit))?.trim().parse().ok()).flatten()
    })
}

/// From the formats of memory.events and of memory.oom_control: a name and a number in each line.
fn kills(events: &str) -> u64 {
    let line = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// Removes groups whose processes are gone; those that are not there are no error.
pub(crate) fn remove(directories: &[PathBuf]) -> io::Result<()> {
    for directory in directories {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    // The group of all goes with the last VM, and what they shared; while it has another it refuses.
    for parent in directories.iter().filter_map(|d| d.parent()).filter(|p| p.ends_with(ALL)) {
        if is_last(parent) {
            let _ = fs::remove_dir(parent.join(SHARED));
        }
        let _ = fs::remove_dir(parent);
    }
    Ok(())
}

/// Whether no VM has a group in this one any more.
fn is_last(parent: &Path) -> bool {
    let mut groups = fs::read_dir(parent).into_iter().flatten().flatten();
    !groups.any(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()) && entry.file_name() != SHARED)
}

/// Limit and use of the group that this process is in.
pub(crate) fn own_memory() -> Option<(u64, u64)> {
    let hierarchy = System::read().find(Controller::Memory)?.clone();
    let (limit, used) = match hierarchy.version {
        Version::One => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        Version::Two => ("memory.max", "memory.current"),
    };
    // "max" is no number, and no limit.
    let number = |file: &str| fs::read_to_string(hierarchy.own.join(file)).ok()?.trim().parse::<u64>().ok();
    Some((number(limit)?, number(used)?))
}

/// What gives an ordinary user groups of his own, where something else gives users groups at all.
pub(crate) fn repair() -> Option<String> {
    let manager = Path::new("/run/systemd/system").is_dir() && !rustix::process::geteuid().is_root();
    manager.then(|| "systemd-run --user --scope imp …, which runs imp in a group of your own".to_owned())
}

fn write(path: &Path, value: &str) -> Result<(), Error> {
    fs::write(path, value).map_err(|source| Error::Write { path: path.to_owned(), source })
}

/// All hierarchies, with the controllers that each has.
struct System {
    hierarchies: Vec<(Vec<String>, Hierarchy)>,
}

impl System {
    fn read() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let mut system = Self::parse(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        for (controllers, hierarchy) in &mut system.hierarchies {
            if hierarchy.version == Version::Two {
                let text = fs::read_to_string(hierarchy.mount.join("cgroup.controllers")).unwrap_or_default();
                *controllers = text.split_whitespace().map(str::to_owned).collect();
            }
        }
        system
    }

    /// From the formats of proc(5) and cgroups(7).
    fn parse(mountinfo: &str, own: &str) -> Self {
        let own: Vec<(&str, &str)> = own
            .lines()
            .filter_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                Some((fields.next()?, fields.next()?))
            })
            .collect();
        let hierarchies = mountinfo.lines().filter_map(|line| {
            let (mount, file_system) = line.split_once(" - ")?;
            let mut mount = mount.split(' ').skip(3);
            let (root, point) = (mount.next()?, PathBuf::from(mount.next()?));
            let mut file_system = file_system.split(' ');
            let kind = file_system.next()?;
            let options = file_system.nth(1)?;
            let below = |path: &str| {
                let path = path.strip_prefix(root).unwrap_or(path);
                point.join(path.trim_start_matches('/'))
            };
            match kind {
                "cgroup" => {
                    let names: Vec<String> = options.split(',').map(str::to_owned).collect();
                    let (_, path) =
                        own.iter().find(|(c, _)| c.split(',').any(|c| names.iter().any(|n| n == c)))?;
                    Some((names, Hierarchy { version: Version::One, own: below(path), mount: point }))
                }
                "cgroup2" => {
                    let (_, path) = own.iter().find(|(controllers, _)| controllers.is_empty())?;
                    Some((Vec::new(), Hierarchy { version: Version::Two, own: below(path), mount: point }))
                }
                _ => None,
            }
        });
        Self { hierarchies: hierarchies.collect() }
    }

    fn find(&self, controller: Controller) -> Option<&Hierarchy> {
        let has = |(names, _): &&(Vec<String>, Hierarchy)| names.iter().any(|n| n == controller.name());
        self.hierarchies.iter().find(has).map(|(_, hierarchy)| hierarchy)
    }
}

impl Hierarchy {
    /// The group that holds all VMs' groups. In version 2 a group with processes of its own may have no limited ones
    /// below it, so that one stands beside this process's own.
    fn parent(&self) -> PathBuf {
        let beside = match self.version {
            Version::One => self.own.as_path(),
            Version::Two if self.own == self.mount => self.own.as_path(),
            Version::Two => self.own.parent().unwrap_or(&self.mount),
        };
        // An owner that was started from within a VM group's parent does not nest another one.
        if beside.ends_with(ALL) { beside.to_owned() } else { beside.join(ALL) }
    }

    fn group(&self, id: &VmId) -> PathBuf {
        self.parent().join(id.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS_1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct
35 31 0:30 /outer /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
    const OWN_1: &str = "4:memory:/outer/a\n1:cpu,cpuacct:/b\n0::/u\n";

    #[test]
    fn a_group_stands_below_this_process_s_own_in_version_1_also_in_a_container() {
        let system = System::parse(MOUNTS_1, OWN_1);
        let memory = system.find(Controller::Memory).unwrap();
        assert_eq!(memory.version, Version::One);
        assert_eq!(memory.parent(), Path::new("/sys/fs/cgroup/memory/a/imp"));
        assert_eq!(system.find(Controller::Cpu).unwrap().parent(), Path::new("/sys/fs/cgroup/cpu/b/imp"));
        assert_eq!(system.find(Controller::Pids), None);
    }

    #[test]
    fn a_group_stands_beside_this_process_s_own_in_version_2() {
        let mounts = "36 31 0:31 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let at = |own: &str| System::parse(mounts, own).hierarchies[0].1.parent();
        assert_eq!(at("0::/user.slice/me.scope\n"), Path::new("/sys/fs/cgroup/user.slice/imp"));
        assert_eq!(at("0::/\n"), Path::new("/sys/fs/cgroup/imp"));
    }

    #[test]
    fn the_limits_are_written_as_each_version_wants_them() {
        let limits = Limits { memory_bytes: 1 << 30, cpu_millis: 1500, threads: 64 };
        assert_eq!(
            Controller::Cpu.settings(Version::One, &limits),
            [("cpu.cfs_period_us", "100000".into()), ("cpu.cfs_quota_us", "150000".into())]
        );
        assert_eq!(Controller::Cpu.settings(Version::Two, &limits), [("cpu.max", "150000 100000".into())]);
        assert_eq!(Controller::Memory.settings(Version::Two, &limits), [("memory.max", "1073741824".into())]);
        assert_eq!(Controller::Pids.settings(Version::One, &limits), [("pids.max", "64".into())]);
    }

    #[test]
    fn kills_for_want_of_memory_are_counted_in_both_versions() {
        assert_eq!(kills("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n"), 1);
        assert_eq!(kills("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), 3);
        assert_eq!((kills("oom_kill_disable 0\nunder_oom 0\n"), kills("")), (0, 0));
    }

    #[test]
    fn a_group_without_a_kill_names_no_limit() {
        let group = tempfile::tempdir().unwrap();
        let directories = [group.path().to_owned()];
        assert_eq!(killed_at_memory_limit(&directories), None);
        fs::write(group.path().join("memory.max"), "1048576\n").unwrap();
        for (kills, limit) in [(0, None), (1, Some(1 << 20))] {
            fs::write(group.path().join("memory.events"), format!("oom {kills}\noom_kill {kills}\n"))
                .unwrap();
            assert_eq!(killed_at_memory_limit(&directories), limit);
        }
    }

    #[test]
    fn what_vms_share_goes_with_the_last_of_them() {
        let all = tempfile::tempdir().unwrap();
        let all = all.path().join(ALL);
        let (one, two, shared) = (all.join("1"), all.join("2"), all.join(SHARED));
        for group in [&one, &two, &shared] {
            fs::create_dir_all(group).unwrap();
        }
        remove(std::slice::from_ref(&one)).unwrap();
        assert!(shared.exists() && two.exists());
        remove(std::slice::from_ref(&two)).unwrap();
        assert!(!all.exists());
    }

    #[test]
    fn what_the_host_does_not_let_is_named_and_what_it_lets_is_there() {
        let id = VmId::from_random(rand());
        let groups = make(&id, &Limits { memory_bytes: 1 << 30, cpu_millis: 1000, threads: 64 });
        for group in &groups.directories {
            assert!(group.join("cgroup.procs").exists(), "{}", group.display());
            assert!(planned(&id).contains(group));
        }
        assert!(!groups.directories.is_empty() || groups.not_enforced.len() == 3);
        remove(&groups.directories).unwrap();
        assert!(groups.directories.iter().all(|g| !g.exists()));
        remove(&groups.directories).unwrap();
    }

    fn rand() -> [u8; 8] {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).unwrap();
        bytes
    }
}
