//! Programs of the image that repair what only they know of, run one after the other before anybody else runs.

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use imp_sys::child::{self, Child, ControllingTerminal, Spawn};
use imp_sys::signals::{self, Number};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::generation::Generation;

pub(super) const DIRECTORY: &str = "/etc/imp/after-restore.d";
/// Time that all of them have together.
pub(super) const TIME: Duration = Duration::from_secs(10);
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{} cannot be read", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("the guest has no cgroup for hooks")]
    Cgroup(#[source] io::Error),
    #[error("{} cannot be started", path.display())]
    Start { path: PathBuf, source: child::Error },
    #[error("{} cannot be waited for", path.display())]
    Wait { path: PathBuf, source: io::Error },
    #[error("{} ended with status {code}", path.display())]
    Failed { path: PathBuf, code: i32 },
    #[error("{} was killed by signal {signal}", path.display())]
    Killed { path: PathBuf, signal: i32 },
    #[error("{} was not done within {} s of all hooks and was killed", path.display(), TIME.as_secs())]
    Late { path: PathBuf },
}

/// What runs them.
pub(super) struct Surroundings<'a> {
    pub(super) null: &'a File,
    /// A cgroup of theirs, made when it is missing; none in a test.
    pub(super) cgroup: Option<PathBuf>,
    pub(super) deadline: Instant,
}

/// Runs the executable files of `directory` in the order of their names; the first that fails is the last. All that they
/// have started ends with them.
pub(super) fn repair(
    directory: &Path,
    generation: &Generation,
    variables: &[Bytes],
    surroundings: &Surroundings<'_>,
) -> Result<(), Error> {
    let hooks = list(directory).map_err(|source| Error::Directory { path: directory.to_owned(), source })?;
    if hooks.is_empty() {
        return Ok(());
    }
    let joined = surroundings.cgroup.as_deref().map(open_cgroup).transpose().map_err(Error::Cgroup)?;
    let environment = environment(generation, variables);
    let result =
        hooks.into_iter().try_for_each(|path| run(path, &environment, joined.as_ref(), surroundings));
    if let Some(cgroup) = &surroundings.cgroup {
        let _ = fs::write(cgroup.join("cgroup.kill"), "1");
    }
    result
}

/// Executable files, without those whose name begins with a dot.
fn list(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut hooks = Vec::new();
    for entry in entries {
        let name: OsString = entry?.file_name();
        let path = directory.join(&name);
        let executable =
            fs::metadata(&path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
        if executable && !name.as_bytes().starts_with(b".") {
            hooks.push(path);
        }
    }
    hooks.sort();
    Ok(hooks)
}

fn open_cgroup(path: &Path) -> io::Result<File> {
    fs::create_dir_all(path)?;
    File::open(path)
}

/// Of a name that is given twice, programs see the first.
fn environment(generation: &Generation, variables: &[Bytes]) -> Vec<CString> {
    let own = [format!("IMP_GENERATION={}", generation.as_str())];
    let fallback = [PATH.to_owned(), "HOME=/root".to_owned()];
    let given = variables.iter().map(|entry| entry.to_vec());
    let all = own.into_iter().map(String::into_bytes).chain(given);
    let mut entries: Vec<Vec<u8>> = all.collect();
    for entry in fallback.map(String::into_bytes) {
        let name = entry.split_inclusive(|byte| *byte == b'=').next().unwrap_or_default().to_vec();
        if !entries.iter().any(|given| given.starts_with(&name)) {
            entries.push(entry);
        }
    }
    // What was parsed has no zero bytes.
    entries.into_iter().filter_map(|entry| CString::new(entry).ok()).collect()
}

fn run(
    path: PathBuf,
    environment: &[CString],
    cgroup: Option<&File>,
    surroundings: &Surroundings<'_>,
) -> Result<(), Error> {
    // A name in a directory has no zero byte.
    let program = CString::new(path.clone().into_os_string().into_vec()).unwrap_or_default();
    let null = surroundings.null.as_fd();
    let started = child::spawn(&Spawn {
        programs: std::slice::from_ref(&program),
        arguments: std::slice::from_ref(&program),
        environment,
        directory: c"/",
        stdin: null,
        stdout: null,
        stderr: null,
        terminal: ControllingTerminal::None,
        uid: 0,
        gid: 0,
        groups: &[],
        open_files: None,
        cgroup: cgroup.map(AsFd::as_fd),
    });
    let child = started.map_err(|source| Error::Start { path: path.clone(), source })?;
    let in_time = ends_before(&child, surroundings.deadline);
    if !matches!(in_time, Ok(true)) {
        let _ = signals::send(child.pid, Number::KILL);
    }
    let status = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED);
    let wait = |source: io::Error| Error::Wait { path: path.clone(), source };
    if !in_time.map_err(wait)? {
        return Err(Error::Late { path });
    }
    let status = status.map_err(|error| wait(error.into()))?;
    match status.and_then(|status| {
        status.exit_status().map_or_else(|| status.terminating_signal().map(Err), |code| Some(Ok(code)))
    }) {
        Some(Ok(0)) | None => Ok(()),
        Some(Ok(code)) => Err(Error::Failed { path, code }),
        Some(Err(signal)) => Err(Error::Killed { path, signal }),
    }
}

fn ends_before(child: &Child, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut polled = [PollFd::new(&child.pidfd, PollFlags::IN)];
        match poll(&mut polled, Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    fn hook(directory: &Path, name: &str, mode: u32, script: &str) {
        use std::io::Write;
        let path = directory.join(name);
        let mut file = File::options().write(true).create_new(true).mode(mode).open(path).unwrap();
        write!(file, "#!/bin/sh\n{script}\n").unwrap();
    }

    fn run_all(directory: &Path, deadline: Instant) -> Result<(), Error> {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let generation = Generation::parse("g-1".into()).unwrap();
        let surroundings = Surroundings { null: &null, cgroup: None, deadline };
        repair(directory, &generation, &["TOKEN=t".into(), "PATH=/bin:/usr/bin".into()], &surroundings)
    }

    #[test]
    fn hooks_run_in_order_with_what_the_machine_was_given() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("hooks");
        fs::create_dir(&below).unwrap();
        let out = directory.path().join("out");
        let say = format!("echo $0 $IMP_GENERATION $TOKEN $PATH $HOME >>{}", out.display());
        hook(&below, "20-b", 0o755, &say);
        hook(&below, "10-a", 0o755, &say);
        hook(&below, ".hidden", 0o755, &say);
        hook(&below, "30-readme", 0o644, &say);
        run_all(&below, Instant::now() + Duration::from_secs(60)).unwrap();
        let line = |name: &str| format!("{}/{name} g-1 t /bin:/usr/bin /root\n", below.display());
        assert_eq!(fs::read_to_string(out).unwrap(), line("10-a") + &line("20-b"));
    }

    #[test]
    fn one_that_fails_or_hangs_is_named_and_is_the_last() {
        let directory = tempfile::tempdir().unwrap();
        let later = Instant::now() + Duration::from_secs(60);
        hook(directory.path(), "3-never", 0o755, "touch never; kill -9 $$");
        hook(directory.path(), "1-fails", 0o755, "exit 7");
        let error = run_all(directory.path(), later).unwrap_err();
        assert!(matches!(&error, Error::Failed { path, code: 7 } if path.ends_with("1-fails")), "{error:?}");
        fs::remove_file(directory.path().join("1-fails")).unwrap();
        hook(directory.path(), "2-hangs", 0o755, "exec sleep 1000");
        let error = run_all(directory.path(), Instant::now()).unwrap_err();
        assert!(matches!(&error, Error::Late { path } if path.ends_with("2-hangs")), "{error:?}");
        fs::remove_file(directory.path().join("2-hangs")).unwrap();
        assert!(matches!(run_all(directory.path(), later), Err(Error::Killed { signal: 9, .. })));
    }

    #[test]
    fn an_image_without_hooks_has_nothing_to_run() {
        run_all(Path::new("/nonexistent"), Instant::now()).unwrap();
    }
}
