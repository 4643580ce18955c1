//! `imp-lab`: runs a command in a fresh node VM, passes its input and output through, and ends with its exit code.

use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use imp_testkit::node::{Command, End, NodeVm, Piece, Place, place};

const USAGE: &str = "\
usage: imp-lab [OPTION…] COMMAND [ARGUMENT…]
       imp-lab --where

Runs a command in a fresh node VM: a machine with nested virtualisation, in which Firecracker and jailer run
(their paths are in $FIRECRACKER and $JAILER, a kernel for guests in $KERNEL).
Input that is not a terminal is read to its end first.

  --share PATH      a directory of this machine that the node sees, too; may be given more than once
  --memory MIB      memory of the node (2048)
  --seconds N       deadline of the command (600)
  --where           only say where tests that need KVM run, `host` or `node`, for the variable IMP_LAB";

fn main() -> anyhow::Result<ExitCode> {
    let mut words = std::env::args().skip(1).peekable();
    let mut node = NodeVm::builder().name("lab");
    let mut deadline = Duration::from_secs(600);
    while let Some(option) = words.next_if(|word| word.starts_with('-')) {
        let mut value = || words.next().with_context(|| format!("{option} needs a value\n\n{USAGE}"));
        match option.as_str() {
            "--share" => node = node.share(value()?),
            "--memory" => node = node.memory_mib(value()?.parse().context("--memory is a number of MiB")?),
            "--seconds" => {
                deadline = Duration::from_secs(value()?.parse().context("--seconds is a number")?);
            }
            "--" => break,
            "--where" => {
                println!("{}", if place() == Place::Host { "host" } else { "node" });
                return Ok(ExitCode::SUCCESS);
            }
            "--help" | "-h" => {
                println!("{USAGE}");
                return Ok(ExitCode::SUCCESS);
            }
            _ => bail!("unknown option {option}\n\n{USAGE}"),
        }
    }
    let Some(program) = words.next() else { bail!("{USAGE}") };
    let mut input = Vec::new();
    if !io::stdin().is_terminal() {
        io::stdin().read_to_end(&mut input)?;
    }
    let command = Command::new(program).arguments(words).input(input).deadline(deadline);
    run(&node.start()?, with_artefacts(command)?)
}

fn with_artefacts(command: Command) -> anyhow::Result<Command> {
    use imp_testkit::node::artefacts::{firecracker, jailer, kernel};
    let found = [("FIRECRACKER", firecracker()?), ("JAILER", jailer()?), ("KERNEL", kernel()?)];
    Ok(found
        .iter()
        .fold(command, |command, (name, path)| command.environment(name, &path.display().to_string())))
}

fn run(node: &NodeVm, command: Command) -> anyhow::Result<ExitCode> {
    let mut process = node.spawn(command)?;
    while let Some(piece) = process.next_piece()? {
        match piece {
            Piece::Output(bytes) => io::stdout().write_all(&bytes).and_then(|()| io::stdout().flush())?,
            Piece::Errors(bytes) => io::stderr().write_all(&bytes)?,
        }
    }
    Ok(match process.wait()?.end {
        Some(End::Exited(code)) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Some(End::Signalled(signal)) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)),
        Some(End::NotStarted(_)) | None => ExitCode::FAILURE,
    })
}
