//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use imp_runtime::DriverChoice;

use crate::protocol::Id;

/// Holds one machine that is asleep, and wakes it: docs/husk.md
#[derive(Debug, Parser)]
#[command(name = "husk", version, disable_help_subcommand = true, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(Box<Serve>),
    Prepare(Prepare),
    Activate(Activate),
    ForkSnapshot(ForkSnapshot),
    RemoveForkSnapshot(RemoveForkSnapshot),
    Status(Status),
}

/// Hold a machine, and do what clients of the control socket ask for
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Where the machine's record, disk and logs are; one husk at a time works in it
    #[arg(long, value_name = "DIR")]
    pub(crate) workdir: PathBuf,
    /// The unix socket to listen on; its whole path may have 107 bytes
    #[arg(long, value_name = "PATH")]
    pub(crate) control_socket: PathBuf,
    /// Imp's data directory, whose templates and kernels are used [default: those of the workdir]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Where sockets of the machine are [default: run in the workdir]
    #[arg(long, value_name = "DIR")]
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Where snapshots for forks are to be found [default: forks in the workdir]
    #[arg(long, value_name = "DIR")]
    pub(crate) forks_dir: Option<PathBuf>,
    /// The name of the machine: a-z, A-Z, 0-9, '_' and '-'
    #[arg(long, value_name = "NAME", default_value = "husk", value_parser = id)]
    pub(crate) vm_id: Id,
    /// Prepare a machine of the snapshot in this directory before anybody is served
    #[arg(long, value_name = "DIR", requires = "expected_digest")]
    pub(crate) snapshot_dir: Option<PathBuf>,
    /// The digest that the snapshot must have
    #[arg(long, value_name = "DIGEST")]
    pub(crate) expected_digest: Option<String>,
    /// What the machine of --snapshot-dir may reach
    #[arg(long, value_enum, default_value = "deny", value_name = "WHAT")]
    pub(crate) egress: Egress,
    /// The static binary that is /init of every guest [default: beside husk, or in ../libexec/imp]
    #[arg(long, env = "IMP_GUEST_AGENT", hide_env_values = true, value_name = "FILE")]
    pub(crate) guest_agent: Option<PathBuf>,
    /// What machines run in: auto, firecracker or qemu
    #[arg(long, env = "IMP_DRIVER", hide_env_values = true, default_value = "auto", value_parser = driver, value_name = "DRIVER")]
    pub(crate) driver: DriverChoice,
    /// The Firecracker program [default: firecracker of PATH, beside husk, or in ../libexec/imp]
    #[arg(long, env = "IMP_FIRECRACKER", hide_env_values = true, value_name = "FILE")]
    pub(crate) firecracker: Option<PathBuf>,
    /// The QEMU program [default: qemu-system-x86_64 of PATH]
    #[arg(long, env = "IMP_QEMU", hide_env_values = true, value_name = "FILE")]
    pub(crate) qemu: Option<PathBuf>,
}

/// Make a machine of a snapshot, up to the point where only its activation is missing
#[derive(Debug, Args)]
pub(crate) struct Prepare {
    #[command(flatten)]
    pub(crate) to: To,
    /// The directory of the snapshot in the husk's store
    #[arg(long, value_name = "DIR")]
    pub(crate) snapshot_dir: PathBuf,
    #[command(flatten)]
    pub(crate) machine: Machine,
}

/// Wake the machine as somebody's
///
/// Secrets stand on no command line: a name takes its value from this command's environment, a file may be a pipe.
#[derive(Debug, Args)]
pub(crate) struct Activate {
    #[command(flatten)]
    pub(crate) to: To,
    /// The directory of the snapshot in the husk's store [default: what is prepared]
    #[arg(long, value_name = "DIR")]
    pub(crate) snapshot_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) machine: Machine,
    /// A variable of what is started in the machine from now on; may be repeated
    #[arg(long = "env", value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// A file with variables: NAME=VALUE in each line, or one object of JSON. May be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Vec<PathBuf>,
    /// As --env, and never written, listed or logged; the value is that of the variable NAME here. May be repeated
    #[arg(long = "secret", value_name = "NAME")]
    pub(crate) secret: Vec<String>,
    /// As --env-file, of secrets; - is stdin, /dev/fd/N an open file. May be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Vec<PathBuf>,
}

/// Make a snapshot of the active machine, for machines that other husks make of it
#[derive(Debug, Args)]
pub(crate) struct ForkSnapshot {
    #[command(flatten)]
    pub(crate) to: To,
    /// The name of the fork
    #[arg(long, value_name = "NAME")]
    pub(crate) fork_id: String,
    /// Where the snapshot is to be found, in the husk's directory of forks [default: there, by the fork's name]
    #[arg(long, value_name = "PATH")]
    pub(crate) snapshot_dir: Option<PathBuf>,
    /// Also if the machine holds secrets, which each that is made of it would have, too
    #[arg(long)]
    pub(crate) with_secrets: bool,
}

/// Remove the snapshot of a fork
#[derive(Debug, Args)]
pub(crate) struct RemoveForkSnapshot {
    #[command(flatten)]
    pub(crate) to: To,
    /// The name of the fork
    #[arg(long, value_name = "NAME")]
    pub(crate) fork_id: String,
}

/// Say what there is; the exit status is 1 when the machine has ended
#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    pub(crate) to: To,
}

/// Whom a client asks.
#[derive(Debug, Args)]
pub(crate) struct To {
    /// The control socket of the husk
    #[arg(long, value_name = "PATH")]
    pub(crate) control_socket: PathBuf,
    /// Milliseconds that it may take at most [default: what the husk allows]
    #[arg(long, value_name = "MILLISECONDS")]
    pub(crate) deadline_ms: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Machine {
    /// The digest that the snapshot must have
    #[arg(long, value_name = "DIGEST")]
    pub(crate) expected_digest: Option<String>,
    /// The snapshot is one that a husk on this machine made for a fork; it needs no digest
    #[arg(long)]
    pub(crate) fork_snapshot: bool,
    /// What the machine may reach over its network
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) egress: Option<Egress>,
    /// The machine must not have a network
    #[arg(long)]
    pub(crate) block_network: bool,
    /// The machine that is meant; the husk of another one refuses
    #[arg(long, value_name = "NAME")]
    pub(crate) vm_id: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Egress {
    /// Nothing
    Deny,
    /// All that any machine may
    Allow,
}

impl Egress {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Deny => "deny",
            Self::Allow => "allow",
        }
    }
}

fn id(text: &str) -> Result<Id, String> {
    let id = Id::parse(text).filter(|id| id.vm_name().is_some());
    id.ok_or_else(|| "use 1 to 63 of a-z, A-Z, 0-9, '_' and '-', starting with a letter or digit".to_owned())
}

fn driver(text: &str) -> Result<DriverChoice, String> {
    DriverChoice::named(text).ok_or_else(|| "it is auto, firecracker or qemu".to_owned())
}
