//! A node's folder on the host, and the guard that starts what is in it.

use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cpio::newc;
use imp_testkit_node::guard::{self, Plan};

use super::artefacts;
use super::error::Error;
use crate::machine;

pub(super) const INITRAMFS: &str = "initramfs.cpio";
pub(super) const DISK: &str = "disk.ext4";

/// Removed when it is dropped, unless the guard has taken it over.
pub(super) struct Folder(tempfile::TempDir);

impl Folder {
    /// Makes a folder with all that is there before the guard: the initial files and the disk.
    pub(super) fn make(disk_gib: u32) -> Result<Self, Error> {
        let folder = tempfile::Builder::new().prefix("imp-node-").tempdir();
        let folder = Self(folder.map_err(|source| Error::Write { path: std::env::temp_dir(), source })?);
        folder.write(INITRAMFS, &initial_files()?)?;
        folder.make_disk(u64::from(disk_gib) << 30)?;
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The guard removes it from now on.
    pub(super) fn keep(self) -> PathBuf {
        self.0.keep()
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<(), Error> {
        let path = self.path().join(name);
        fs::write(&path, content).map_err(|source| Error::Write { path, source })
    }

    fn make_disk(&self, size: u64) -> Result<(), Error> {
        let path = self.path().join(DISK);
        File::create(&path)
            .and_then(|file| file.set_len(size))
            .map_err(|source| Error::Write { path: path.clone(), source })?;
        let program = machine::program("mke2fs")?;
        // What makes the disk ready at once, as it need not survive anything.
        let options =
            ["-q", "-F", "-t", "ext4", "-O", "^has_journal,verity", "-E", "lazy_itable_init=1", "-m", "0"];
        let output = Command::new(&program).args(options).arg(&path).output();
        let output = output.map_err(|source| Error::Run { program: program.clone(), source })?;
        if output.status.success() {
            return Ok(());
        }
        Err(Error::Refused { program, said: String::from_utf8_lossy(&output.stderr).trim_end().to_owned() })
    }

    /// Starts the guard in the calling thread's network; returns the test's end of the channel.
    pub(super) fn start_guard(&self, plan: &Plan) -> Result<(UnixStream, Child), Error> {
        self.unshare(plan, &[])
    }

    pub(super) fn start_guard_without_network(&self, plan: &Plan) -> Result<(UnixStream, Child), Error> {
        self.unshare(plan, &["--net"])
    }

    fn unshare(&self, plan: &Plan, more: &[&str]) -> Result<(UnixStream, Child), Error> {
        let plan_file = || Error::Write {
            path: self.path().join(guard::PLAN),
            source: io::ErrorKind::InvalidData.into(),
        };
        self.write(guard::PLAN, &serde_json::to_vec(plan).map_err(|_| plan_file())?)?;
        let log = self.path().join(guard::GUARD_LOG);
        let failed = |source| Error::Write { path: log.clone(), source };
        let log_file = File::create(&log).map_err(failed)?;
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let program = machine::program("unshare")?;
        let guard = Command::new(&program)
            .args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"])
            .args(more)
            .arg(artefacts::node_program()?)
            .arg("guard")
            .arg(self.path())
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(log_file.try_clone().map_err(failed)?)
            .stderr(log_file)
            // A Ctrl-C on the terminal is for the test; its end ends the node.
            .process_group(0)
            .spawn()
            .map_err(|source| Error::Run { program, source })?;
        Ok((ours, guard))
    }
}

/// The kernel's modules and PID 1.
fn initial_files() -> Result<Vec<u8>, Error> {
    let (modules, program) = (artefacts::modules()?, artefacts::node_program()?);
    let read = |path: PathBuf| fs::read(&path).map_err(|source| Error::Read { path, source });
    let mut files = read(modules)?;
    let program = read(program)?;
    let append = |files: &mut Vec<u8>| -> io::Result<()> {
        for directory in ["dev", "proc", "sys", "root"] {
            newc::Builder::new(directory).mode(0o040_755).write(&mut *files, 0).finish()?;
        }
        // What PID 1 says before it has mounted /dev goes here.
        newc::Builder::new("dev/console")
            .mode(0o020_600)
            .rdev_major(5)
            .rdev_minor(1)
            .write(&mut *files, 0)
            .finish()?;
        let size = u32::try_from(program.len()).map_err(io::Error::other)?;
        let mut file = newc::Builder::new("init").mode(0o100_755).write(&mut *files, size);
        io::Write::write_all(&mut file, &program)?;
        file.finish()?;
        newc::trailer(files)?;
        Ok(())
    };
    append(&mut files).map_err(|source| Error::Write { path: INITRAMFS.into(), source })?;
    Ok(files)
}
