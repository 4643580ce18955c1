//! Whether Firecracker runs guests here, found out by running one; remembered for this boot and this program.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::{Instant, timeout};

use super::version::{self, Unusable, Version};
use super::{jail, privileges};
use crate::vmm::kvm;
use crate::vmm::memory::{self, Freshness};

/// What the probe guest may take: a thousand exits and a start, a few hundred milliseconds where KVM works, and seconds on a
/// host that is emulated and busy.
const GUEST_DEADLINE: Duration = Duration::from_secs(15);
const ASK_DEADLINE: Duration = Duration::from_secs(10);
/// The probe guest takes half of this on hardware.
const FULL_PACE: Duration = Duration::from_millis(100);
const JAILER: &str = "jailer";
/// In place of a VM's id.
const TRIAL: &str = "trial";
/// Where the guest's kernel is loaded and begins.
const LOAD: u64 = 0x10_0000;

/// A Firecracker that works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Found {
    pub program: PathBuf,
    pub version: Version,
    pub pace: Pace,
    /// The jailer, if a guest ran in a jail; else why not.
    pub jailer: Result<PathBuf, String>,
}

/// How fast guests are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Pace {
    Full,
    /// As below a host that emulates this one, or one that is very busy.
    Slow,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "firecracker is neither in PATH nor beside imp nor in ../libexec/imp; IMP_FIRECRACKER may name it"
    )]
    NotInstalled,
    #[error("cannot run {}", program.display())]
    Run {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} did not answer within {} s", program.display(), ASK_DEADLINE.as_secs())]
    Late { program: PathBuf },
    #[error("{} is not used", program.display())]
    Version {
        program: PathBuf,
        #[source]
        source: Unusable,
    },
    #[error(transparent)]
    Kvm(#[from] kvm::Unusable),
    #[error("no guest runs in it: {detail}")]
    NoGuest { detail: String },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Finds out, or remembers. `memory` is a file for the answer, in a directory that is there.
pub(crate) async fn probe(program: &Path, memory: &Path, freshness: Freshness) -> Result<Found, Error> {
    let run = |source| Error::Run { program: program.to_owned(), source };
    let circumstances = memory::Circumstances::now(program).map_err(run)?;
    if freshness == Freshness::Remembered
        && let Some(found) = memory::recall::<Found>(memory, &circumstances)
    {
        return Ok(found);
    }
    let version = ask(program).await?;
    kvm::usable()?;
    let began = Instant::now();
    run_guest(program, memory).await?;
    let pace = if began.elapsed() < FULL_PACE { Pace::Full } else { Pace::Slow };
    let jailer = try_jailer(program, memory).await;
    let found = Found { program: program.to_owned(), version, pace, jailer };
    memory::keep(memory, circumstances, &found)
        .map_err(|source| Error::Write { path: memory.to_owned(), source })?;
    Ok(found)
}

async fn ask(program: &Path) -> Result<Version, Error> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    let output = timeout(ASK_DEADLINE, output)
        .await
        .map_err(|_| Error::Late { program: program.to_owned() })?
        .map_err(|source| Error::Run { program: program.to_owned(), source })?;
    version::usable(&String::from_utf8_lossy(&output.stdout))
        .map_err(|source| Error::Version { program: program.to_owned(), source })
}

/// Boots a kernel of a few instructions, which ends its machine.
async fn run_guest(program: &Path, memory: &Path) -> Result<(), Error> {
    let (kernel, settings) = (memory.with_extension("kernel"), memory.with_extension("settings"));
    let write = |path: &Path, bytes: &[u8]| {
        fs::write(path, bytes).map_err(|source| Error::Write { path: path.to_owned(), source })
    };
    write(&kernel, &guest())?;
    write(&settings, machine(&kernel).as_bytes())?;
    let child = Command::new(program)
        .args(["--no-api", "--config-file"])
        .arg(&settings)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let result = timeout(GUEST_DEADLINE, child).await;
    for file in [kernel, settings] {
        // Whatever is left of it is written over by the next probe.
        let _ = fs::remove_file(file);
    }
    judge(result, program)
}

fn machine(kernel: &Path) -> String {
    let machine = serde_json::json!({
        "boot-source": {"kernel_image_path": kernel, "boot_args": ""},
        "machine-config": {"vcpu_count": 1, "mem_size_mib": 16},
        "drives": [],
    });
    machine.to_string()
}

/// Whether the guest has said what it was to say.
fn judge(
    result: Result<io::Result<std::process::Output>, tokio::time::error::Elapsed>,
    program: &Path,
) -> Result<(), Error> {
    let output = match result {
        Err(_) => {
            let detail = format!("it did not finish within {} s", GUEST_DEADLINE.as_secs());
            return Err(Error::NoGuest { detail });
        }
        Ok(output) => output.map_err(|source| Error::Run { program: program.to_owned(), source })?,
    };
    if output.status.success() && output.stdout.contains(&SAID) {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let last: String = last.chars().filter(|c| !c.is_control()).take(300).collect();
    Err(Error::NoGuest { detail: if last.is_empty() { output.status.to_string() } else { last } })
}

/// The jailer that lies beside this Firecracker, if it works.
async fn try_jailer(program: &Path, memory: &Path) -> Result<PathBuf, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root can make jails".to_owned());
    }
    let missing = privileges::missing_for_jails(privileges::own().map_err(|error| error.to_string())?);
    if !missing.is_empty() {
        return Err(format!("the jailer needs {}, which this process does not have", missing.join(", ")));
    }
    let program = fs::canonicalize(program).map_err(|error| error.to_string())?;
    let jailer = program.with_file_name(JAILER);
    if !jailer.is_file() {
        return Err(format!("there is no {}", jailer.display()));
    }
    let base = memory.with_extension("jail");
    let result = run_jailed(&program, &jailer, &base).await;
    if let Err(error) = jail::remove(&base) {
        tracing::warn!(path = %base.display(), %error, "a trial jail is left");
    }
    result.map(|()| jailer)
}

async fn run_jailed(program: &Path, jailer: &Path, base: &Path) -> Result<(), String> {
    let text = |error: io::Error| error.to_string();
    jail::remove(base).map_err(text)?;
    let root = jail::root(base, program, TRIAL);
    fs::create_dir_all(&root).map_err(text)?;
    fs::write(root.join("kernel"), guest()).map_err(text)?;
    fs::write(root.join("settings"), machine(Path::new("kernel"))).map_err(text)?;
    for name in ["kernel", "settings"] {
        jail::give(&root.join(name), jail::USERS.start).map_err(|error| crate::vm::chain(&error))?;
    }
    let user = jail::USERS.start.to_string();
    let child = Command::new(jailer)
        .args(["--id", &super::mark(TRIAL), "--uid", &user, "--gid", &user, "--exec-file"])
        .arg(program)
        .arg("--chroot-base-dir")
        .arg(base)
        .args(["--", "--no-api", "--config-file", "settings"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    judge(timeout(GUEST_DEADLINE, child).await, jailer).map_err(|error| crate::vm::chain(&error))
}

/// What the guest writes to its console.
const SAID: u8 = 0x07;

/// An ELF file of one segment, entered in 64-bit mode: writes a thousand times to the serial port, each an exit to
/// Firecracker, then resets the machine by its keyboard controller.
fn guest() -> Vec<u8> {
    const CODE: &[u8] = &[
        0xb9, 0xe8, 0x03, 0x00, 0x00, // mov ecx, 1000
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
        0xb0, SAID, // again: mov al, SAID
        0xee, // out dx, al
        0xff, 0xc9, // dec ecx
        0x75, 0xf9, // jnz again
        0xb0, 0xfe, // mov al, 0xfe
        0xe6, 0x64, // out 0x64, al
        0xf4, // hlt
        0xeb, 0xfd, // jmp to the hlt
    ];
    const HEADER: u64 = 64;
    const SEGMENT: u64 = 56;
    let length = CODE.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    // An executable for x86-64, version 1.
    elf.extend([2_u16, 62].map(u16::to_le_bytes).concat());
    elf.extend(1_u32.to_le_bytes());
    elf.extend([LOAD, HEADER, 0].map(u64::to_le_bytes).concat());
    elf.extend(0_u32.to_le_bytes());
    elf.extend([HEADER as u16, SEGMENT as u16, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
    // Loaded, readable and executable.
    elf.extend([1_u32, 5].map(u32::to_le_bytes).concat());
    elf.extend([HEADER + SEGMENT, LOAD, LOAD, length, length, 0x1000].map(u64::to_le_bytes).concat());
    elf.extend_from_slice(CODE);
    elf
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program in place of Firecracker.
    fn fake(directory: &Path, script: &str) -> PathBuf {
        crate::vmm::fake::program(directory, "firecracker", script)
    }

    #[tokio::test]
    async fn a_firecracker_in_which_no_guest_ran_is_not_used_and_says_why() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("probe.json");
        let silent = fake(directory.path(), "exit 0");
        let error = run_guest(&silent, &memory).await.unwrap_err();
        assert!(matches!(error, Error::NoGuest { .. }), "{error}");
        let refuses = fake(directory.path(), "echo Missing KVM capabilities >&2; exit 1");
        let error = run_guest(&refuses, &memory).await.unwrap_err();
        assert!(
            matches!(&error, Error::NoGuest { detail } if detail == "Missing KVM capabilities"),
            "{error}"
        );
        let runs = fake(directory.path(), "printf '\\007'");
        run_guest(&runs, &memory).await.unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "nothing but the program is left");
    }

    #[tokio::test]
    async fn a_firecracker_of_another_version_is_not_even_tried() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("probe.json");
        let faulty = fake(directory.path(), "[ $1 = --version ] && echo Firecracker v1.16.0");
        let error = probe(&faulty, &memory, Freshness::Remembered).await.unwrap_err();
        assert!(matches!(error, Error::Version { source: Unusable::Faulty, .. }), "{error}");
        let none = probe(&directory.path().join("none"), &memory, Freshness::Now).await.unwrap_err();
        assert!(matches!(none, Error::Run { .. }), "{none}");
    }
}
