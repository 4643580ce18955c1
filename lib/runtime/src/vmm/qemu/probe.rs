//! What QEMU and this host can really do, found out by running them; remembered for this boot and this binary.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::timeout;

use crate::status::Accelerator;
use crate::vmm::memory::{self, Circumstances, Freshness};

/// What the probe guest may take: it does 10,000 exits to QEMU, a few hundred milliseconds at the worst where KVM works.
const GUEST_DEADLINE: Duration = Duration::from_secs(3);
const ASK_DEADLINE: Duration = Duration::from_secs(30);
const TSC_SPAN: Duration = Duration::from_millis(50);
/// Exit status of QEMU when the probe guest wrote 16 to the exit port: value * 2 + 1.
const GUEST_SUCCESS: i32 = 33;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Found {
    pub program: PathBuf,
    pub version: String,
    pub kvm: Kvm,
    /// Rate of the host's time stamp counter.
    pub tsc_khz: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kvm")]
pub(crate) enum Kvm {
    Works,
    Missing,
    /// It cannot be opened by this user.
    NotAllowed {
        detail: String,
    },
    /// A guest did not run on it.
    Unusable {
        detail: String,
    },
}

impl Found {
    pub(crate) fn accelerator(&self) -> Accelerator {
        match self.kvm {
            Kvm::Works => Accelerator::Kvm,
            Kvm::Missing | Kvm::NotAllowed { .. } | Kvm::Unusable { .. } => Accelerator::Emulation,
        }
    }

    pub(crate) fn why(&self) -> String {
        match &self.kvm {
            Kvm::Works => "a guest ran on /dev/kvm".into(),
            Kvm::Missing => "there is no /dev/kvm".into(),
            Kvm::NotAllowed { detail } => format!("/dev/kvm cannot be opened: {detail}"),
            Kvm::Unusable { detail } => format!("/dev/kvm opens, but no guest runs on it: {detail}"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{name} is not installed: run `apt-get install qemu-system-x86`")]
    NotInstalled { name: String },
    #[error("cannot run {}", program.display())]
    Run {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} did not answer within {} s", program.display(), ASK_DEADLINE.as_secs())]
    Late { program: PathBuf },
    #[error("{} does not say its version", program.display())]
    NoVersion { program: PathBuf },
    #[error("{} {version} has no machine `microvm`: install QEMU 7.2 or later", program.display())]
    NoMicrovm { program: PathBuf, version: String },
    #[error("a guest did not run under emulation: {detail}")]
    NoGuest { detail: String },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Finds out, or remembers. `scratch` is a directory for the probe guest's ROM and the memory of the answer.
pub(crate) async fn probe(program: &Path, memory: &Path, freshness: Freshness) -> Result<Found, Error> {
    let run = |source| Error::Run { program: program.to_owned(), source };
    let circumstances = Circumstances::now(program).map_err(run)?;
    if freshness == Freshness::Remembered
        && let Some(found) = memory::recall::<Found>(memory, &circumstances)
    {
        return Ok(found);
    }
    let found = find_out(program, memory).await?;
    memory::keep(memory, circumstances, &found)
        .map_err(|source| Error::Write { path: memory.to_owned(), source })?;
    Ok(found)
}

async fn find_out(program: &Path, memory: &Path) -> Result<Found, Error> {
    let version = parse_version(&ask(program, &["--version"]).await?)
        .ok_or_else(|| Error::NoVersion { program: program.to_owned() })?;
    let machines = ask(program, &["-machine", "help"]).await?;
    if !machines.lines().any(|line| line.split_whitespace().next() == Some("microvm")) {
        return Err(Error::NoMicrovm { program: program.to_owned(), version });
    }
    let rom = memory.with_extension("rom");
    fs::write(&rom, guest()).map_err(|source| Error::Write { path: rom.clone(), source })?;
    let emulated = run_guest(program, &rom, Accelerator::Emulation).await;
    let kvm = kvm(program, &rom).await;
    // Whatever is left of it is written over by the next probe.
    let _ = fs::remove_file(&rom);
    if let (Err(detail), false) = (emulated, kvm == Kvm::Works) {
        return Err(Error::NoGuest { detail });
    }
    let tsc_khz = tokio::task::spawn_blocking(|| imp_sys::tsc::measure_khz(TSC_SPAN)).await.ok().flatten();
    Ok(Found { program: program.to_owned(), version, kvm, tsc_khz })
}

async fn kvm(program: &Path, rom: &Path) -> Kvm {
    match fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Kvm::Missing,
        Err(error) => return Kvm::NotAllowed { detail: error.to_string() },
        Ok(_) => {}
    }
    match run_guest(program, rom, Accelerator::Kvm).await {
        Ok(()) => Kvm::Works,
        Err(detail) => Kvm::Unusable { detail },
    }
}

async fn ask(program: &Path, arguments: &[&str]) -> Result<String, Error> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = timeout(ASK_DEADLINE, output)
        .await
        .map_err(|_| Error::Late { program: program.to_owned() })?
        .map_err(|source| Error::Run { program: program.to_owned(), source })?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// "QEMU emulator version 7.2.22 (Debian …)" gives "7.2.22".
fn parse_version(text: &str) -> Option<String> {
    let version = text.split_once("version ")?.1.split_whitespace().next()?;
    version.starts_with(|c: char| c.is_ascii_digit()).then(|| version.to_owned())
}

/// Runs the probe guest with the processor that real guests get; says what went wrong.
async fn run_guest(program: &Path, rom: &Path, accelerator: Accelerator) -> Result<(), String> {
    let (accel, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm", "host"),
        Accelerator::Emulation => ("tcg", "max,-erms"),
    };
    let child = Command::new(program)
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-m", "4M"])
        .args(["-machine", "microvm,acpi=off,pit=off,pic=off,rtc=off,isa-serial=off"])
        .args(["-accel", accel, "-cpu", cpu, "-device", "isa-debug-exit,iobase=0xf4,iosize=1"])
        .arg("-bios")
        .arg(rom)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match timeout(GUEST_DEADLINE, child).await {
        Err(_) => return Err(format!("it did not finish within {} s", GUEST_DEADLINE.as_secs())),
        Ok(Err(error)) => return Err(error.to_string()),
        Ok(Ok(output)) => output,
    };
    if output.status.code() == Some(GUEST_SUCCESS) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let first: String = said.lines().next().unwrap_or_default().chars().take(200).collect();
    Err(if first.is_empty() { output.status.to_string() } else { first })
}

/// A 64 KiB ROM in real mode: writes 10,000 times to the POST port, each an exit to QEMU, then ends the machine.
fn guest() -> Vec<u8> {
    const START: &[u8] = &[
        0x66, 0xb9, 0x10, 0x27, 0x00, 0x00, // mov ecx, 10000
        0xe6, 0x80, // again: out 0x80, al
        0x66, 0x49, // dec ecx
        0x75, 0xfa, // jnz again
        0xb0, 0x10, // mov al, 16
        0xe6, 0xf4, // out 0xf4, al
        0xf4, // hlt
        0xeb, 0xfd, // jmp to the hlt
    ];
    // The processor starts 16 bytes before the end.
    const RESET: &[u8] = &[0xe9, 0x0d, 0x00]; // jmp to the start
    let mut rom = START.to_vec();
    rom.resize(0xfff0, 0);
    rom.extend_from_slice(RESET);
    rom.resize(0x1_0000, 0);
    rom
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_whatever_a_distribution_adds() {
        let text = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright";
        assert_eq!(parse_version(text).as_deref(), Some("7.2.22"));
        assert_eq!(parse_version("QEMU emulator version 10.0.2\n").as_deref(), Some("10.0.2"));
        assert_eq!(parse_version("something else"), None);
    }

    /// A program in place of QEMU.
    fn fake(directory: &Path, script: &str) -> PathBuf {
        crate::vmm::fake::program(directory, "qemu", script)
    }

    const ANSWERS: &str = "case \"$1\" in --version) echo QEMU emulator version 9.9.9; exit;; -machine) echo microvm x; exit;; esac";

    #[tokio::test]
    async fn a_guest_runs_under_emulation_and_the_answer_is_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("probes.json");
        let program =
            crate::vmm::find_program("qemu-system-x86_64").expect("apt-get install qemu-system-x86");
        let found = probe(&program, &file, Freshness::Remembered).await.unwrap();
        assert!(found.tsc_khz.is_some());
        let circumstances = Circumstances::now(&program).unwrap();
        let remembered = Found { version: "remembered".into(), ..found.clone() };
        memory::keep(&file, circumstances, &remembered).unwrap();
        assert_eq!(probe(&program, &file, Freshness::Remembered).await.unwrap(), remembered);
        assert_eq!(probe(&program, &file, Freshness::Now).await.unwrap().version, found.version);
    }

    #[tokio::test]
    async fn a_kvm_that_opens_but_runs_no_guest_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let rom = directory.path().join("rom");
        let dies = fake(directory.path(), "echo cannot set a register >&2; kill -6 $$");
        assert_eq!(run_guest(&dies, &rom, Accelerator::Kvm).await, Err("cannot set a register".to_owned()));
        let works = fake(directory.path(), "exit 33");
        assert_eq!(run_guest(&works, &rom, Accelerator::Kvm).await, Ok(()));
    }

    #[tokio::test]
    async fn a_qemu_on_which_nothing_runs_is_an_error_that_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("probes.json");
        let program = fake(directory.path(), &format!("{ANSWERS}\necho broken >&2; exit 1"));
        let error = probe(&program, &memory, Freshness::Now).await.unwrap_err();
        assert!(matches!(&error, Error::NoGuest { detail } if detail == "broken"), "{error}");
        let program = fake(directory.path(), "echo QEMU emulator version 1.0");
        let error = probe(&program, &memory, Freshness::Now).await.unwrap_err();
        assert!(matches!(error, Error::NoMicrovm { .. }), "{error}");
    }
}
