//! What a VM could leave behind on a machine, compared before and after.
//!
//! Other work goes on on the same machine, so only what refers to the watched folders counts, and cgroups, network devices
//! and tables of filters with a name of ours. Devices and tables are those of the calling thread's network namespace; the
//! namespaces of VMs are mounts.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

mod tables;

/// Part of the name of every cgroup, and the beginning of that of every network device and table, that we make.
const OURS: &str = "imp";

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// A process whose command line, environment, directory or open files name a watched folder.
    Process {
        pid: u32,
        started: u64,
        command: String,
    },
    Socket(PathBuf),
    Mount(PathBuf),
    Cgroup(PathBuf),
    NetworkDevice(String),
    /// Of nftables.
    Table(String),
    File(PathBuf),
}

impl fmt::Display for Thing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, command, .. } => write!(f, "process {pid}: {command}"),
            Self::Socket(path) => write!(f, "socket {}", path.display()),
            Self::Mount(path) => write!(f, "mount {}", path.display()),
            Self::Cgroup(path) => write!(f, "cgroup {}", path.display()),
            Self::NetworkDevice(name) => write!(f, "network device {name}"),
            Self::Table(name) => write!(f, "nftables table {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// All that was there at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    folders: Vec<PathBuf>,
    things: BTreeSet<Thing>,
}

impl Snapshot {
    /// `folders` are watched: data and runtime directories of one test. They need not exist.
    pub fn take(folders: &[&Path]) -> io::Result<Self> {
        let folders: Vec<PathBuf> = folders.iter().map(|folder| (*folder).to_owned()).collect();
        let mut things = BTreeSet::new();
        processes(&folders, &mut things)?;
        sockets(&folders, &mut things)?;
        mounts(&folders, &mut things)?;
        cgroups(Path::new("/sys/fs/cgroup"), &mut things);
        network_devices(&mut things)?;
        let tables = tables::names()?.into_iter().filter(|name| name.starts_with(OURS));
        things.extend(tables.map(Thing::Table));
        for folder in &folders {
            files(folder, &mut things)?;
        }
        Ok(Self { folders, things })
    }

    /// What is there now and was not at this moment.
    pub fn new_since(&self) -> io::Result<Vec<Thing>> {
        let folders: Vec<&Path> = self.folders.iter().map(PathBuf::as_path).collect();
        Ok(Self::take(&folders)?.things.difference(&self.things).cloned().collect())
    }

    /// Waits until nothing is new but what is `expected`, at most for `deadline`; the error lists the rest.
    pub fn wait_until_nothing_is_left(
        &self,
        deadline: Duration,
        expected: impl Fn(&Thing) -> bool,
    ) -> anyhow::Result<()> {
        let until = Instant::now() + deadline;
        loop {
            let left: Vec<String> =
                self.new_since()?.iter().filter(|thing| !expected(thing)).map(ToString::to_string).collect();
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("left behind:\n  {}", left.join("\n  "));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn processes(folders: &[PathBuf], things: &mut BTreeSet<Thing>) -> io::Result<()> {
    let this = std::process::id();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if pid == this || !refers(&entry.path(), folders) {
            continue;
        }
        let Some(started) = started(&entry.path()) else { continue };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ").trim_end().to_owned();
        things.insert(Thing::Process { pid, started, command });
    }
    Ok(())
}

/// Whether the process at `proc` has to do with the folders. One that has ended meanwhile has not.
fn refers(proc: &Path, folders: &[PathBuf]) -> bool {
    let named = |file: &str| {
        let text = fs::read(proc.join(file)).unwrap_or_default();
        folders.iter().any(|folder| contains(&text, folder.as_os_str().as_bytes()))
    };
    let below = |link: &Path| {
        fs::read_link(link).is_ok_and(|target| folders.iter().any(|folder| target.starts_with(folder)))
    };
    let open = || {
        let files = fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
        files.into_iter().any(|file| below(&file.path()))
    };
    named("cmdline") || named("environ") || below(&proc.join("cwd")) || open()
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    !part.is_empty() && text.windows(part.len()).any(|window| window == part)
}

/// Start time in clock ticks, which tells two processes with the same pid apart; `None` for zombies and for the gone.
fn started(proc: &Path) -> Option<u64> {
    let stat = fs::read_to_string(proc.join("stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

fn sockets(folders: &[PathBuf], things: &mut BTreeSet<Thing>) -> io::Result<()> {
    let table = fs::read_to_string("/proc/net/unix")?;
    let paths = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(7)).map(PathBuf::from);
    things.extend(paths.filter(|path| is_below(path, folders)).map(Thing::Socket));
    Ok(())
}

fn mounts(folders: &[PathBuf], things: &mut BTreeSet<Thing>) -> io::Result<()> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    things.extend(points.filter(|path| is_below(path, folders)).map(Thing::Mount));
    Ok(())
}

/// A cgroup may vanish while it is looked at: what cannot be read is not there.
fn cgroups(folder: &Path, things: &mut BTreeSet<Thing>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let name = entry.file_name();
            // The parent of all VMs' groups is anybody's: owners share it and remove it when it is empty.
            if name != OURS && (folder.ends_with(OURS) || name.to_string_lossy().contains(OURS)) {
                things.insert(Thing::Cgroup(entry.path()));
            }
            cgroups(&entry.path(), things);
        }
    }
}

fn network_devices(things: &mut BTreeSet<Thing>) -> io::Result<()> {
    // Two lines of headings, and a line for each device, which begins with its name.
    let table = fs::read_to_string("/proc/thread-self/net/dev")?;
    let names = table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    things.extend(names.filter(|name| name.starts_with(OURS)).map(Thing::NetworkDevice));
    Ok(())
}

fn files(folder: &Path, things: &mut BTreeSet<Thing>) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        things.insert(Thing::File(entry.path()));
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files(&entry.path(), things)?;
        }
    }
    Ok(())
}

fn is_below(path: &Path, folders: &[PathBuf]) -> bool {
    folders.iter().any(|folder| path.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::world;

    fn left(before: &Snapshot) -> Vec<String> {
        before.new_since().unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_process_is_seen_by_its_arguments_environment_directory_and_open_files() {
        let folder = tempfile::tempdir().unwrap();
        let open = folder.path().join("open");
        fs::write(&open, b"").unwrap();
        let before = Snapshot::take(&[folder.path()]).unwrap();
        let sleep = || {
            let mut command = Command::new("sh");
            command.args(["-c", "read line"]).stdin(Stdio::piped());
            command
        };
        let commands = [
            sleep().arg(folder.path()).spawn(),
            sleep().env("IMP_DATA_DIR", folder.path()).spawn(),
            sleep().current_dir(folder.path()).spawn(),
            sleep().stdout(fs::File::open(&open).unwrap()).spawn(),
        ];
        let mut children = commands.map(Result::unwrap);
        assert_eq!(left(&before).len(), 4, "{:?}", left(&before));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        before.wait_until_nothing_is_left(Duration::from_secs(5), |_| false).unwrap();
    }

    #[test]
    fn sockets_and_files_are_seen_and_what_is_expected_is_not_reported() {
        let folder = tempfile::tempdir().unwrap();
        let before = Snapshot::take(&[folder.path()]).unwrap();
        let path = folder.path().join("owner.sock");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(before.new_since().unwrap().contains(&Thing::Socket(path.clone())));
        drop(listener);
        let error = before.wait_until_nothing_is_left(Duration::ZERO, |_| false).unwrap_err().to_string();
        assert!(error.contains("owner.sock"), "{error}");
        before
            .wait_until_nothing_is_left(Duration::ZERO, |thing| thing == &Thing::File(path.clone()))
            .unwrap();
    }

    #[test]
    fn devices_and_tables_of_this_threads_network_are_seen() {
        world::on_own_host(|_| {
            let before = Snapshot::take(&[]).unwrap();
            world::ip("link add imp-1 type veth peer name other").unwrap();
            world::nft("add table inet imp012").unwrap();
            world::nft("add table ip foreign").unwrap();
            assert_eq!(left(&before), ["network device imp-1", "nftables table imp012"]);
            world::ip("link delete imp-1").unwrap();
            world::nft("delete table inet imp012").unwrap();
            before.wait_until_nothing_is_left(Duration::ZERO, |_| false).unwrap();
        })
        .unwrap();
    }

    #[test]
    fn mounts_are_found_below_the_folder() {
        let mut things = BTreeSet::new();
        mounts(&[PathBuf::from("/proc")], &mut things).unwrap();
        assert!(things.contains(&Thing::Mount("/proc".into())), "{things:?}");
    }
}
