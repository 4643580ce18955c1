//! The command line as a whole; each command's own part stands with the command.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::commands::{
    attach, completions, cp, doctor, exec, fork, image, inspect, kill, logs, owner, pause, pool,
    port_forward, probe, prune, ps, resume, rm, run, stop, suspend, template, top, update, version, wait,
};
use crate::context::Context;
use crate::exit::{OWN_FAILURE, Outcome};

/// Runs programs in microVMs made from OCI images: a kernel of its own for each, as easy as a container.
#[derive(Debug, Parser)]
#[command(name = "imp", version, disable_help_subcommand = true, max_term_width = 100)]
#[command(
    after_help = "`--help` shows more than `-h`: the flags that say where things are, too. Settings are taken from flags, then IMP_* variables, then the settings file, then defaults."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Heading of the flags that every command takes.
const PLACES: &str = "Places";

/// Flags that every command takes. Each may also come from a variable, which clap does not know: it would name the flag
/// in the usage of every error.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Global {
    /// Where images, kernels, records and disks are, or IMP_DATA_DIR [default: /var/lib/imp for root, else
    /// $XDG_DATA_HOME/imp]
    #[arg(long, global = true, help_heading = PLACES, hide_short_help = true, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Where sockets and locks are, or IMP_RUNTIME_DIR [default: /run/imp for root, else $XDG_RUNTIME_DIR/imp]
    #[arg(long, global = true, help_heading = PLACES, hide_short_help = true, value_name = "DIR")]
    pub(crate) runtime_dir: Option<PathBuf>,
    /// The settings file, TOML, or IMP_SETTINGS [default: /etc/imp/settings.toml for root, else
    /// $XDG_CONFIG_HOME/imp/settings.toml]
    #[arg(long, global = true, help_heading = PLACES, hide_short_help = true, value_name = "FILE")]
    pub(crate) settings: Option<PathBuf>,
    /// The static binary that becomes /init of every guest, or IMP_GUEST_AGENT [default: beside imp, or in
    /// ../libexec/imp]
    #[arg(long, global = true, help_heading = PLACES, hide_short_help = true, value_name = "FILE")]
    pub(crate) guest_agent: Option<PathBuf>,
    /// What VMs run in: auto, firecracker or qemu, or IMP_DRIVER [default: auto: Firecracker where it runs guests, else
    /// QEMU]
    #[arg(long, global = true, help_heading = PLACES, hide_short_help = true, value_name = "DRIVER")]
    pub(crate) driver: Option<OsString>,
    /// The Firecracker program, or IMP_FIRECRACKER [default: firecracker of PATH, beside imp, or in ../libexec/imp]
    #[arg(long, global = true, help_heading = PLACES, hide_short_help = true, value_name = "FILE")]
    pub(crate) firecracker: Option<PathBuf>,
    /// The QEMU program, or IMP_QEMU [default: qemu-system-x86_64 of PATH]
    #[arg(long, global = true, help_heading = PLACES, hide_short_help = true, value_name = "FILE")]
    pub(crate) qemu: Option<PathBuf>,
}

impl Global {
    /// What no flag says is as a variable says; an empty one says nothing.
    pub(crate) fn or_variables(self, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let said = |name| variable(name).filter(|value| !value.is_empty());
        let or = |flag: Option<PathBuf>, name| flag.or_else(|| said(name).map(PathBuf::from));
        Self {
            data_dir: or(self.data_dir, "IMP_DATA_DIR"),
            runtime_dir: or(self.runtime_dir, "IMP_RUNTIME_DIR"),
            settings: or(self.settings, "IMP_SETTINGS"),
            guest_agent: or(self.guest_agent, "IMP_GUEST_AGENT"),
            driver: self.driver.or_else(|| said("IMP_DRIVER")),
            firecracker: or(self.firecracker, "IMP_FIRECRACKER"),
            qemu: or(self.qemu, "IMP_QEMU"),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Box<run::Run>),
    Exec(exec::Exec),
    Ps(ps::Ps),
    Logs(logs::Logs),
    Attach(attach::Attach),
    Cp(cp::Cp),
    Stop(stop::Stop),
    Kill(kill::Kill),
    Rm(rm::Rm),
    Wait(wait::Wait),
    Inspect(inspect::Inspect),
    Top(top::Top),
    Update(update::Update),
    PortForward(port_forward::PortForward),
    Fork(fork::Fork),
    Pause(pause::Pause),
    Suspend(suspend::Suspend),
    Resume(resume::Resume),
    Image(image::Image),
    Template(template::Template),
    Pool(pool::Pool),
    Prune(prune::Prune),
    Doctor(doctor::Doctor),
    Probe(probe::Probe),
    Completions(completions::Completions),
    Version(version::Version),
    #[command(hide = true)]
    Owner(owner::Owner),
}

impl Command {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self {
            Self::Run(command) => command.run(context),
            Self::Exec(command) => command.run(context),
            Self::Ps(command) => command.run(context),
            Self::Logs(command) => command.run(context),
            Self::Attach(command) => command.run(context),
            Self::Cp(command) => command.run(context),
            Self::Stop(command) => command.run(context),
            Self::Kill(command) => command.run(context),
            Self::Rm(command) => command.run(context),
            Self::Wait(command) => command.run(context),
            Self::Inspect(command) => command.run(context),
            Self::Top(command) => command.run(context),
            Self::Update(command) => command.run(context),
            Self::PortForward(command) => command.run(context),
            Self::Fork(command) => command.run(context),
            Self::Pause(command) => command.run(context),
            Self::Suspend(command) => command.run(context),
            Self::Resume(command) => command.run(context),
            Self::Image(command) => command.run(context),
            Self::Template(command) => command.run(context),
            Self::Pool(command) => command.run(context),
            Self::Probe(command) => command.run(context),
            Self::Prune(command) => command.run(context),
            Self::Doctor(command) => command.run(context),
            Self::Completions(command) => command.run(),
            Self::Version(command) => command.run(context),
            Self::Owner(command) => command.run(context),
        }
    }

    /// Exit status when the command itself fails.
    pub(crate) fn own_failure(&self) -> u8 {
        match self {
            Self::Run(_) | Self::Exec(_) => OWN_FAILURE,
            Self::Ps(_)
            | Self::Logs(_)
            | Self::Attach(_)
            | Self::Cp(_)
            | Self::Stop(_)
            | Self::Kill(_)
            | Self::Rm(_)
            | Self::Wait(_)
            | Self::Inspect(_)
            | Self::Top(_)
            | Self::Update(_)
            | Self::PortForward(_)
            | Self::Fork(_)
            | Self::Pause(_)
            | Self::Suspend(_)
            | Self::Resume(_)
            | Self::Image(_)
            | Self::Template(_)
            | Self::Pool(_)
            | Self::Probe(_)
            | Self::Prune(_)
            | Self::Doctor(_)
            | Self::Completions(_)
            | Self::Version(_)
            | Self::Owner(_) => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_flag_wins_over_a_variable_and_an_empty_variable_says_nothing() {
        let flags = Global { data_dir: Some("/flag".into()), ..Global::default() };
        let merged = flags.or_variables(|name| match name {
            "IMP_DATA_DIR" | "IMP_QEMU" => Some("/variable".into()),
            _ => Some(OsString::new()),
        });
        assert_eq!(merged.data_dir, Some("/flag".into()));
        assert_eq!(merged.qemu, Some("/variable".into()));
        assert_eq!((merged.runtime_dir, merged.settings, merged.guest_agent), (None, None, None));
    }

    #[test]
    fn what_is_made_of_a_snapshot_takes_no_flag_of_a_machine_that_boots() {
        let parses = |line: &str| Arguments::try_parse_from(line.split(' ')).is_ok();
        for good in [
            "imp run --template t",
            "imp run -d --rm --template t --name n -p 80 -e A=1 --secret B=2",
            "imp run --pool p -e A=1 --secret B=2 --hostname h",
            "imp run -d --rm --pool p --name n -p 80 -l a=b",
            "imp template build --cpus 2 t image -- program --flag",
        ] {
            assert!(parses(good), "{good}");
        }
        for bad in [
            "imp run",
            "imp run --template t image",
            "imp run --template t --pool p",
            "imp run --template t --cpus 2",
            "imp run --template t --network none",
            "imp run --template t -v /a:/b",
            "imp run --pool p --egress deny",
            "imp run --secret A=1 image",
        ] {
            assert!(!parses(bad), "{bad}");
        }
    }

    /// What stands for a number, or for what else may begin with a minus sign, in a flag's help.
    const NUMBERS: [&str; 9] =
        ["COUNT", "KEYS", "LINES", "NUMBER", "PORT", "SECONDS", "SIZE", "TIME", "nofile=NUMBER"];

    #[test]
    fn a_number_with_a_minus_sign_is_a_wrong_number_and_no_flag() {
        fn check(command: &clap::Command) {
            for argument in command.get_arguments().filter(|argument| !argument.is_positional()) {
                let named = argument.get_value_names().into_iter().flatten();
                if named.into_iter().any(|name| NUMBERS.contains(&name.as_str())) {
                    let (command, flag) = (command.get_name(), argument.get_id());
                    assert!(argument.is_allow_hyphen_values_set(), "{command} {flag}");
                }
            }
            command.get_subcommands().for_each(check);
        }
        check(&Arguments::command());
        for (line, said) in [
            ("imp run -m -1 image", "memory must be 96 MiB to 1048576 MiB"),
            ("imp run --memory=-1g image", "memory must be 96 MiB to 1048576 MiB"),
            ("imp run --disk -1 image", "a disk must be 16 MiB to"),
            ("imp run --cpus -2 image", "write a number of processors"),
            ("imp run --disk-bps -1 image", "write a number of bytes"),
            ("imp run --disk-iops -1 image", "write a whole number, 0 or more"),
            ("imp run --network-pps -1 image", "write a whole number, 0 or more"),
            ("imp run --stop-timeout -1 image", "write seconds"),
            ("imp run --ulimit -1 image", "write nofile=NUMBER"),
            ("imp run -m --rm image", "memory must be"),
            ("imp exec -m -1 vm true", "write a number of bytes"),
            ("imp exec --pids-limit -1 vm true", "-1 is not in 0.."),
            ("imp stop -t -1 vm", "write seconds"),
            ("imp update -m -1 vm", "memory must be"),
            ("imp logs -n -1 vm", "write a number of lines"),
            ("imp fork -n -1 vm", "-1 is not in 1..=1000"),
            ("imp pool create --size -1 --template t p", "-1 is not in 0.."),
        ] {
            let error = Arguments::try_parse_from(line.split(' ')).expect_err(line).to_string();
            assert!(error.contains(said) && !error.contains("tip:"), "{line}: {error}");
        }
        assert!(Arguments::try_parse_from(["imp", "run", "--pids-limit", "-1", "image"]).is_ok());
    }

    #[test]
    fn keys_that_are_none_are_refused_with_how_to_write_them() {
        for command in ["run", "exec", "attach"] {
            for keys in ["", "ctrl-", "a,,b", "detach"] {
                let line = ["imp", command, "--detach-keys", keys, "vm", "true"];
                let error = Arguments::try_parse_from(line).expect_err(keys).to_string();
                assert!(error.contains("as in ctrl-p,ctrl-q"), "{command} {keys:?}: {error}");
            }
        }
    }

    #[test]
    fn every_flag_and_command_has_a_help_text() {
        fn check(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Arguments::command());
    }
}
