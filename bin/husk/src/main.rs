//! A husk: one machine that is asleep until it is somebody's, in a process of its own; and the client that asks it.

mod activate;
mod adopt;
mod args;
mod client;
mod connection;
mod end;
mod fork;
mod husk;
mod layout;
mod lifecycle;
mod network;
mod prepare;
mod protocol;
mod refusal;
mod serve;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::{Arguments, Command};
use crate::protocol::Prepare;
use crate::serve::Why;

/// Exit status of a client whose request was refused, and of a husk that could not go on.
const REFUSED: u8 = 1;
/// Exit status of a client that got no answer.
const NO_ANSWER: u8 = 3;

fn main() -> ExitCode {
    let asked = match Arguments::parse().command {
        Command::Serve(args) => {
            return match serve(*args) {
                Ok(Why::Told) => ExitCode::SUCCESS,
                Ok(Why::Broken) => REFUSED.into(),
                Err(error) => complain(&error, REFUSED),
            };
        }
        Command::Prepare(args) => client::prepare(&args),
        Command::Activate(args) => client::activate(&args),
        Command::ForkSnapshot(args) => client::fork_snapshot(&args),
        Command::RemoveForkSnapshot(args) => client::remove_fork_snapshot(&args),
        Command::Status(args) => client::status(&args),
    };
    match asked {
        Ok(client::Result::Good) => ExitCode::SUCCESS,
        Ok(client::Result::Refused) => REFUSED.into(),
        Err(error) => complain(&error, NO_ANSWER),
    }
}

fn complain(error: &anyhow::Error, code: u8) -> ExitCode {
    eprintln!("husk: {error:#}");
    code.into()
}

fn serve(args: args::Serve) -> anyhow::Result<Why> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    log_to_stderr();
    let settings = settings(args)?;
    // One thread is enough: work that blocks has threads of its own.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(serve::serve(settings));
    runtime.shutdown_background();
    Ok(served?)
}

/// `IMP_LOG`: a level, or levels of modules as in `info,imp_runtime=debug`.
fn log_to_stderr() {
    let filter = std::env::var("IMP_LOG").unwrap_or_else(|_| "info".to_owned());
    let filter: Targets = filter.parse().unwrap_or_else(|_| Targets::new().with_default(LevelFilter::INFO));
    let lines = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(std::io::stderr);
    lines.finish().with(filter).init();
}

fn settings(args: args::Serve) -> anyhow::Result<serve::Settings> {
    let here = std::env::current_dir().context("there is no working directory")?;
    let workdir = here.join(args.workdir);
    let below = |given: Option<PathBuf>, name: &str| {
        given.map_or_else(|| workdir.join(name), |given| here.join(given))
    };
    let layout = layout::Layout {
        runtime: below(args.runtime_dir, "run"),
        forks: below(args.forks_dir, "forks"),
        workdir: workdir.clone(),
    };
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let guest_agent =
        args.guest_agent.map_or_else(|| default_guest_agent(&program), |given| here.join(given));
    let prepare = args.snapshot_dir.map(|directory| {
        let (digest, egress) = (args.expected_digest.as_deref(), args.egress.name());
        Prepare::of(&here.join(directory), digest, egress)
    });
    Ok(serve::Settings {
        layout,
        data: args.data_dir.map(|data| here.join(data)),
        socket: here.join(args.control_socket),
        vm: args.vm_id,
        guest_agent,
        driver: args.driver,
        firecracker: args.firecracker.map(|program| here.join(program)),
        qemu: args.qemu.map(|program| here.join(program)),
        prepare: prepare.transpose()?,
    })
}

/// Beside the program, as a build leaves it, or where packages put such things.
fn default_guest_agent(program: &Path) -> PathBuf {
    let directory = program.parent().unwrap_or(Path::new("/"));
    let beside = directory.join("guest-agent");
    let packaged = directory.parent().unwrap_or(Path::new("/")).join("libexec/imp/guest-agent");
    if !beside.exists() && packaged.exists() { packaged } else { beside }
}
