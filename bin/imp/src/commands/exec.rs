//! `imp exec`

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use anyhow::bail;
use bytes::Bytes;
use clap::Args;
use imp_embedded::Owner;
use imp_protocol::guest::{ProcessLimits, ProcessSpec, exec_input};
use imp_protocol::process::{Exit, Session};

use crate::context::Context;
use crate::exit::{Failure, OWN_FAILURE, Outcome};
use crate::output;
use crate::session::{self, End, Interrupts, Program, Signals, Stdin, Wiring, Written, exit_status};
use crate::terminal::{self, DetachKeys};
use crate::value;

/// Run another program in a VM
///
/// The exit status is passed on as by `imp run`. When this command is killed, the program and all it started are killed.
#[derive(Debug, Args)]
#[command(override_usage = "imp exec [FLAGS] VM [--] COMMAND [ARGUMENT]...")]
pub(crate) struct Exec {
    /// The VM (name, id, or the beginning of an id), then the program and its arguments: literal, no shell
    #[arg(required = true, num_args = 2.., trailing_var_arg = true, value_name = "VM COMMAND")]
    vm_and_command: Vec<OsString>,
    /// Send this command's input to the program
    #[arg(short, long)]
    interactive: bool,
    /// Give the program a terminal
    #[arg(short, long)]
    tty: bool,
    /// Leave the program running
    #[arg(short, long, conflicts_with = "interactive")]
    detach: bool,
    /// A variable beside those of the VM's own program; NAME alone takes its value from here. May be repeated
    #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,
    /// Who runs the program: a name or number of the guest, and a group [default: who runs the VM's own]
    #[arg(short, long, value_name = "USER[:GROUP]")]
    user: Option<String>,
    /// Where the program runs; made when missing [default: where the VM's own program runs]
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<OsString>,
    /// Kill the program after this time, in seconds; 0: never
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true,
          default_value = "0", value_parser = value::duration)]
    timeout: Duration,
    /// Most memory of the program's tree, with k, m or g; 0: no limit of its own
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true,
          default_value = "0", value_parser = value::bytes)]
    memory: u64,
    /// Most processes of the program's tree; 0: no limit
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, default_value_t = 0)]
    pids_limit: u32,
    /// Keys that leave the program (which is killed then, unless it was started with -d)
    #[arg(long, value_name = "KEYS", allow_hyphen_values = true, default_value = "ctrl-p,ctrl-q")]
    detach_keys: DetachKeys,
}

impl Exec {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let run = context.block_on(self.in_vm(context));
        run.and_then(|code| code).map_err(|error| Failure::of(OWN_FAILURE, error))
    }

    async fn in_vm(&self, context: &Context) -> anyhow::Result<u8> {
        if self.tty && self.interactive && !terminal::is_terminal(std::io::stdin()) {
            bail!("-t with -i needs a terminal, and the input is none; leave -t out to pipe something in");
        }
        let (vm, command) = match self.vm_and_command.as_slice() {
            [vm, dashes, command @ ..] if dashes == "--" => (vm, command),
            [vm, command @ ..] => (vm, command),
            [] => bail!("say in which VM"),
        };
        if command.is_empty() {
            bail!("say what to run");
        }
        let owner = context.owner().await?;
        let spec = self.spec(command);
        let connection = guest(&owner, &vm.to_string_lossy()).await?;
        let session = Session::open(connection, exec_input::Input::Start(spec)).await;
        let session = session.map_err(imp_embedded::client::Error::from)?;
        let mut program = Program::Exec(Box::new(session));
        if self.detach {
            return started(&mut program).await;
        }
        let wiring = Wiring {
            stdin: if self.interactive { Stdin::Sent } else { Stdin::None },
            terminal: if self.tty { session::Terminal::Own } else { session::Terminal::None },
            signals: Signals::PassedOn,
            reader: session::Reader::Only,
            detach_keys: self.detach_keys.clone(),
        };
        match session::run(&mut program, &wiring, &mut Interrupts::catch()?, &mut Written::default()).await {
            Err(error) if crate::commands::run::is_lost(&error) => {
                bail!(
                    "the VM or the owner of the VMs ended, and the program with it; `imp ps` says what is left"
                )
            }
            end => conclude(end?),
        }
    }

    fn spec(&self, command: &[OsString]) -> ProcessSpec {
        let bytes = |text: &OsString| Bytes::copy_from_slice(text.as_bytes());
        ProcessSpec {
            arguments: command.iter().map(bytes).collect(),
            environment: environment(&self.env, |name| std::env::var_os(name)),
            user: self.user.clone().unwrap_or_default(),
            working_directory: self.workdir.as_ref().map(bytes).unwrap_or_default(),
            as_main: true,
            terminal: self.tty.then(|| terminal::size().unwrap_or_default().into()),
            stdin: self.interactive,
            detach: self.detach,
            paced: true,
            limits: Some(ProcessLimits {
                memory_bytes: self.memory,
                processes: self.pids_limit,
                timeout_milliseconds: u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX),
                ..ProcessLimits::default()
            }),
            ..ProcessSpec::default()
        }
    }
}

/// What was asked for; a bare name that is not set here is left out.
fn environment(flags: &[OsString], host: impl Fn(&OsString) -> Option<OsString>) -> Vec<Bytes> {
    let variable = |flag: &OsString| {
        if flag.as_bytes().contains(&b'=') {
            return Some(Bytes::copy_from_slice(flag.as_bytes()));
        }
        let value = host(flag)?;
        let mut whole = flag.clone();
        whole.push("=");
        whole.push(value);
        Some(whole.into_vec().into())
    };
    flags.iter().filter_map(variable).collect()
}

/// The agent of a VM, by any of the VM's names.
pub(crate) async fn guest(owner: &Owner, vm: &str) -> anyhow::Result<imp_protocol::connection::Connection> {
    let status = owner.inspect(vm).await?;
    Ok(owner.guest(&status.id))
}

async fn started(program: &mut Program) -> anyhow::Result<u8> {
    use imp_embedded::client::Event;
    use imp_protocol::process::Output;
    match program.next().await? {
        Event::Output(Output::Exited(exit)) => conclude(End::Exited(exit)),
        Event::Output(_) | Event::Failed(_) => Ok(0),
    }
}

fn conclude(end: End) -> anyhow::Result<u8> {
    match end {
        End::Exited(exit) => {
            match &exit {
                Exit::NotStarted { reason, .. } => {
                    output::complain(&format!("the program could not be started: {reason}"));
                }
                Exit::Signal { timed_out: true, .. } => {
                    output::warn("the program was killed: its time was up")
                }
                Exit::Signal { out_of_memory: true, .. } => {
                    output::warn("the program was killed: it ran out of memory");
                }
                Exit::Signal { .. } | Exit::Code(_) => {}
            }
            Ok(exit.code())
        }
        // A detachment: the program dies with its session.
        End::Detached => Ok(0),
        End::Failed(_) => Ok(OWN_FAILURE),
        End::Interrupted(kind) | End::LeftRunning(kind) => Ok(exit_status(kind)),
        End::BrokenPipe => Err(crate::exit::nobody_reads().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_name_takes_its_value_from_here_or_is_left_out() {
        let flags: Vec<OsString> = vec!["A=1".into(), "HERE".into(), "NOWHERE".into()];
        let variables = environment(&flags, |name| (name == "HERE").then(|| "x=y".into()));
        let expected: [&[u8]; 2] = [b"A=1", b"HERE=x=y"];
        assert_eq!(variables, expected);
    }
}
