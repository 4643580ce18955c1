//! The `imp` of this demo: its own data and runtime directories, and the check that both end empty of VMs.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use imp_testkit::leftovers::{Snapshot, Thing};
use imp_testkit::machine;

pub(crate) fn step(title: &str) {
    println!("\n== {title}");
}

pub(crate) struct Machine {
    imp: PathBuf,
    pub(crate) folder: tempfile::TempDir,
    before: Snapshot,
}

/// How a command ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    /// Standard output.
    pub(crate) output: String,
}

impl Machine {
    pub(crate) fn new() -> anyhow::Result<Self> {
        // Unix sockets have short paths: the folder is right below the system's own.
        let folder = tempfile::Builder::new().prefix("imp-demo-").tempdir()?;
        machine::data_directory(&folder.path().join("data"))?;
        let before = Snapshot::take(&[folder.path()])?;
        Ok(Self { imp: machine::imp()?, folder, before })
    }

    /// Runs `imp` with these arguments, which must succeed, and returns its standard output.
    pub(crate) fn imp(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let ended = self.command(arguments).run()?;
        ensure!(ended.code == Some(0), "imp {} ended with {:?}", arguments.join(" "), ended.code);
        Ok(ended.output)
    }

    /// The same without a word, for what is asked again and again.
    pub(crate) fn quietly(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let Invocation { mut command, .. } = self.command(arguments);
        let output = command.stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "imp {} ended with {}", arguments.join(" "), output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Invocation {
        let mut command = Command::new(&self.imp);
        command
            .args(arguments)
            .env("IMP_DATA_DIR", self.folder.path().join("data"))
            .env("IMP_RUNTIME_DIR", self.folder.path().join("run"));
        Invocation { command, input: Vec::new() }
    }

    /// Ends what runs in the background and checks that only what belongs to the store is there.
    pub(crate) fn leave_nothing(self) -> anyhow::Result<()> {
        step("Nothing is left");
        let list = self.imp(&["ps", "-a", "-o", "name"])?;
        ensure!(list.trim().is_empty(), "VMs are left: {list}");
        self.imp(&["owner", "stop"])?;
        self.before
            .wait_until_nothing_is_left(Duration::from_secs(30), |thing| matches!(thing, Thing::File(_)))?;
        self.folder.close().context("removing the demo's folder")
    }
}

impl Ended {
    /// Standard output of a command that succeeded.
    pub(crate) fn good(self) -> anyhow::Result<String> {
        ensure!(self.code == Some(0), "it ended with {:?}", self.code);
        Ok(self.output)
    }
}

/// One call of `imp`.
pub(crate) struct Invocation {
    command: Command,
    input: Vec<u8>,
}

impl Invocation {
    pub(crate) fn argument(mut self, argument: &str) -> Self {
        self.command.arg(argument);
        self
    }

    pub(crate) fn input(mut self, input: &[u8]) -> Self {
        self.input = input.to_owned();
        self
    }

    /// Prints the command, runs it and prints what it says.
    pub(crate) fn run(mut self) -> anyhow::Result<Ended> {
        println!("$ {}", self.shown());
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = self.command.spawn().with_context(|| format!("running {}", self.shown()))?;
        let mut stdin = child.stdin.take().context("a child without stdin")?;
        let mut stdout = child.stdout.take().context("a child without stdout")?;
        let input = self.input;
        // A program that ends without reading all of its input is fine.
        let writer = thread::spawn(move || drop(stdin.write_all(&input)));
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes)?;
        let status = child.wait()?;
        drop(writer.join());
        let output = String::from_utf8_lossy(&bytes).into_owned();
        for line in output.lines() {
            println!("  {line}");
        }
        if status.code() != Some(0) {
            println!("  (exit code {})", status.code().map_or("none".to_owned(), |code| code.to_string()));
        }
        Ok(Ended { code: status.code(), output })
    }

    /// The command as one would type it.
    fn shown(&self) -> String {
        let words = self.command.get_args().map(|word| {
            let word = word.to_string_lossy();
            let plain = word.chars().all(|letter| letter.is_alphanumeric() || "-_./:=".contains(letter));
            if plain { word.into_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
        });
        std::iter::once("imp".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
    }
}
