//! `imp template build`

use std::ffi::OsString;
use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use imp_embedded::client::Building;
use imp_embedded::name::TemplateName;
use imp_runtime::Digest;
use imp_runtime::spec::{Arguments, BaseDisk, Cpus, HostName, Stdin};
use imp_runtime::template::{BuildStep, InitCommand, Probe, Readiness, TemplateSpec};
use imp_storage::image::config::ImageConfig;

use crate::commands::image::source;
use crate::commands::run::flags::{Machine, Variables};
use crate::commands::run::spec::{self, Size, Wanted, World};
use crate::commands::run::with_absolute_path;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::progress::{Detail, Display};
use crate::value;

/// What every guest of a template is called until it is somebody's: the same whoever builds it.
const HOSTNAME: &str = "template";

/// Boot a machine from an image, have it become ready, and keep it as it is then
///
/// VMs of the template go on from there, each as a machine of its own. Whatever reaches the guest decides what a template
/// is: built again from the same, it is the same and nothing is done; from something else it is a new one, to which the
/// name leads from then on. The old one stays beside it.
#[derive(Debug, Args)]
#[command(override_usage = "imp template build [FLAGS] NAME IMAGE [--] [COMMAND] [ARGUMENT]...")]
pub(crate) struct Build {
    /// What leads to the template: 1 to 63 letters, digits, '_', '.' or '-'
    #[arg(value_name = "NAME")]
    name: TemplateName,
    /// The image, then the program and its arguments in the place of the image's CMD: as for `imp run`
    #[arg(required = true, trailing_var_arg = true, value_name = "IMAGE [COMMAND]")]
    image_and_command: Vec<OsString>,

    /// A line for the guest's `sh -c` before the program starts. May be repeated: one after the other
    #[arg(long, value_name = "COMMAND")]
    init: Vec<String>,
    /// Most time for each --init
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true,
          default_value = "600", value_parser = value::duration)]
    init_timeout: Duration,
    /// The program has printed this within one line
    #[arg(long, value_name = "TEXT")]
    wait_log: Vec<String>,
    /// Something listens on this port of the guest
    #[arg(long, value_name = "PORT", allow_hyphen_values = true)]
    wait_port: Vec<NonZeroU16>,
    /// A GET on this port of the guest is answered with a status from 200 to 399
    #[arg(long, value_name = "PORT[/PATH]")]
    wait_http: Vec<Http>,
    /// A line for the guest's `sh -c` ends with 0; asked again until it does
    #[arg(long, value_name = "COMMAND")]
    wait_command: Vec<String>,
    /// Most time for each of these; they are waited for in this order
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true,
          default_value = "120", value_parser = value::duration)]
    wait_timeout: Duration,

    /// Keep the program's input open, for `imp attach` and `imp run -i --template`
    #[arg(short, long)]
    interactive: bool,
    #[command(flatten)]
    variables: Variables,
    #[command(flatten)]
    machine: Machine,
    /// No progress: only the digest
    #[arg(short, long)]
    quiet: bool,
}

/// `--wait-http`: a port and a path.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Http {
    port: NonZeroU16,
    path: String,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("write PORT or PORT/PATH, as in 8080/healthy")]
struct NotHttp;

impl FromStr for Http {
    type Err = NotHttp;

    fn from_str(text: &str) -> Result<Self, NotHttp> {
        let (port, path) = text.split_once('/').unwrap_or((text, ""));
        // It stands in the first line of a request.
        if !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(NotHttp);
        }
        Ok(Self { port: port.parse().map_err(|_| NotHttp)?, path: format!("/{path}") })
    }
}

impl Build {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let detail = if self.quiet { Detail::Quiet } else { Detail::Shown };
        let image = self.image_and_command.first().and_then(|image| image.to_str());
        let image = image.context("the image's name is not UTF-8")?;
        let store = context.store()?;
        let taken = source::take(&store, image, self.machine.pull.into(), detail)?;
        let config = store.inspect(&taken)?;
        // Held until the template itself holds it.
        let base = store.base_disk(&taken, &[], &Display::new(detail))?;
        let disk = BaseDisk { image: image.to_owned(), key: base.key.to_string(), path: base.path.clone() };
        let spec = self.spec(context, &config, disk)?;
        let digest = context.block_on(self.build(context, &spec, detail))??;
        output::print(&format!("{digest}\n"))?;
        Ok(0)
    }

    fn spec(&self, context: &Context, image: &ImageConfig, base: BaseDisk) -> anyhow::Result<TemplateSpec> {
        let defaults = &context.settings.run;
        let hostname: HostName = HOSTNAME.parse()?;
        let Size { cpu_millis, memory, scratch } = spec::size(&self.machine, defaults)?;
        let world = World {
            defaults,
            base,
            made_up_name: String::new(),
            env_files: self.variables.of_files()?,
            host_env: &|name| std::env::var_os(name),
            mounts: Vec::new(),
            terminal: None,
        };
        let wanted = Wanted {
            machine: &self.machine,
            variables: &self.variables.env,
            command: spec::command(&self.image_and_command),
            stdin: if self.interactive { Stdin::Attached } else { Stdin::Null },
            terminal: None,
        };
        Ok(TemplateSpec {
            main: spec::main_process(&wanted, image, &hostname, &world)?,
            base: world.base,
            cpus: Cpus::new(cpu_millis.div_ceil(1000))?,
            memory,
            scratch,
            network: spec::network(&self.machine, defaults)?,
            kernel: with_absolute_path(spec::kernel(&self.machine, defaults))?,
            hostname,
            limits: spec::limits(&self.machine, cpu_millis),
            init: self.init()?,
            ready: self.ready()?,
        })
    }

    fn init(&self) -> anyhow::Result<Vec<InitCommand>> {
        let command =
            |line: &String| anyhow::Ok(InitCommand { arguments: shell(line)?, at_most: self.init_timeout });
        self.init.iter().map(command).collect()
    }

    fn ready(&self) -> anyhow::Result<Vec<Readiness>> {
        let logs = self.wait_log.iter().cloned().map(Probe::Log).map(anyhow::Ok);
        let ports = self.wait_port.iter().copied().map(Probe::Port).map(anyhow::Ok);
        let http =
            self.wait_http.iter().cloned().map(|Http { port, path }| anyhow::Ok(Probe::Http { port, path }));
        let commands = self.wait_command.iter().map(|line| anyhow::Ok(Probe::Command(shell(line)?)));
        let probes = logs.chain(ports).chain(http).chain(commands);
        probes.map(|probe| anyhow::Ok(Readiness { probe: probe?, at_most: self.wait_timeout })).collect()
    }

    async fn build(&self, context: &Context, spec: &TemplateSpec, detail: Detail) -> anyhow::Result<Digest> {
        let owner = context.owner().await?;
        let mut build = owner.build_template(Some(&self.name), spec).await?;
        let mut steps = 0;
        while let Some(building) = build.next().await? {
            match building {
                Building::Step(step) => {
                    steps += 1;
                    if detail == Detail::Shown {
                        output::say(&told(&step, &spec.init));
                    }
                }
                Building::Made(digest) => {
                    if detail == Detail::Shown && steps == 0 {
                        output::say("it is there already, made of the same");
                    }
                    return Ok(digest);
                }
                Building::Failed(why) => bail!("no template was made: {}", lines(&why)),
            }
        }
        bail!("the owner of the VMs went away while it built the template; build it again")
    }
}

fn shell(line: &str) -> anyhow::Result<Arguments> {
    Ok(Arguments::new(["sh", "-c", line])?)
}

/// What a guest said must not steer the terminal, but its lines stay lines.
fn lines(text: &str) -> String {
    text.trim_end().lines().map(output::printable).collect::<Vec<_>>().join("\n")
}

fn told(step: &BuildStep, init: &[InitCommand]) -> String {
    match step {
        BuildStep::Boot => match init.len() {
            0 => "booting".to_owned(),
            1 => "booting, and running 1 init command".to_owned(),
            more => format!("booting, and running {more} init commands"),
        },
        BuildStep::Ready(Readiness { probe, .. }) => match probe {
            Probe::Command(arguments) => {
                format!(
                    "waiting for a command to succeed: {}",
                    arguments
                        .iter()
                        .last()
                        .map_or_else(String::new, |line| String::from_utf8_lossy(line).into_owned())
                )
            }
            Probe::Port(port) => format!("waiting for port {port}"),
            Probe::Http { port, path } => format!("waiting for an answer of http://localhost:{port}{path}"),
            Probe::Log(text) => format!("waiting for {text:?} in the log"),
        },
        BuildStep::Snapshot => "ready; writing it down".to_owned(),
        BuildStep::Keep => "hashing it".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_and_a_path_are_asked_for_over_http() {
        let http = |text: &str| text.parse::<Http>().map(|http| (http.port.get(), http.path));
        assert_eq!(http("80"), Ok((80, "/".into())));
        assert_eq!(http("8080/a/b?c"), Ok((8080, "/a/b?c".into())));
        for bad in ["", "/", "0", "x/y", "80/a b", "80/\r\n"] {
            assert_eq!(http(bad), Err(NotHttp), "{bad:?}");
        }
    }

    #[test]
    fn what_a_guest_said_is_shown_in_lines_and_steers_no_terminal() {
        assert_eq!(lines("a\x1b[2J\nb\n\n"), "a\u{fffd}[2J\nb");
    }
}
