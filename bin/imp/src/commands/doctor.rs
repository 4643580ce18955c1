//! `imp doctor`

use clap::Args;
use imp_embedded::report::Finding;
use imp_runtime::Verdict;
use serde::Serialize;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output::{self, Color, Format};

/// Check what works on this machine, by trying it, and say how to repair the rest
///
/// The exit status is 1 if something that Imp needs does not work.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Form of the output
    #[arg(short, long, value_enum, default_value = "table", value_name = "FORM")]
    output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Good,
    /// Imp works without it, with less.
    Degraded,
    Bad,
}

#[derive(Debug, Serialize)]
struct Shown {
    name: String,
    state: State,
    found: String,
    /// Command that repairs it.
    repair: Option<String>,
}

impl From<Finding> for Shown {
    fn from(finding: Finding) -> Self {
        let (state, repair) = match finding.verdict {
            Verdict::Good => (State::Good, None),
            Verdict::Degraded { repair } => (State::Degraded, repair),
            Verdict::Bad { repair } => (State::Bad, Some(repair)),
        };
        Self { name: finding.name, state, found: finding.found, repair }
    }
}

impl Doctor {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let mut checks = vec![settings(context), images(context)];
        checks.extend(engine(context));
        output::print(&render(self.output, &checks))?;
        Ok(u8::from(checks.iter().any(|check| check.state == State::Bad)))
    }
}

fn settings(context: &Context) -> Shown {
    let layout = &context.settings.layout;
    Shown {
        name: "places".to_owned(),
        state: State::Good,
        found: format!("data in {}, sockets in {}", layout.data.display(), layout.runtime.display()),
        repair: None,
    }
}

fn images(context: &Context) -> Shown {
    let shown = |state, found: String, repair| Shown { name: "images".to_owned(), state, found, repair };
    match context.store().and_then(|store| Ok(store.images()?)) {
        Ok(images) => shown(State::Good, format!("{} images in the store", images.len()), None),
        Err(error) => {
            let directory = context.settings.layout.images();
            let repair = format!("make {} writable, or set IMP_DATA_DIR", directory.display());
            shown(State::Bad, format!("{error:#}"), Some(repair))
        }
    }
}

/// What the owner finds; that it starts at all is a check too.
fn engine(context: &Context) -> Vec<Shown> {
    let found = context.block_on(async { anyhow::Ok(context.owner().await?.doctor().await?) });
    match found.and_then(|found| found) {
        Ok(checks) => checks.into_iter().map(Into::into).collect(),
        Err(error) => {
            let log = context.settings.layout.log();
            vec![Shown {
                name: "owner".to_owned(),
                state: State::Bad,
                found: format!("{error:#}"),
                repair: Some(format!("see {}", log.display())),
            }]
        }
    }
}

fn render(format: Format, checks: &[Shown]) -> String {
    match format {
        Format::Json => output::json(&checks),
        Format::Name => checks
            .iter()
            .filter(|check| check.state != State::Good)
            .map(|check| format!("{}\n", check.name))
            .collect(),
        Format::Table => {
            let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
            let mut text = String::new();
            for check in checks {
                let mark = match check.state {
                    State::Good => output::colored_out(Color::Green, "ok  "),
                    State::Degraded => output::colored_out(Color::Yellow, "less"),
                    State::Bad => output::colored_out(Color::Red, "BAD "),
                };
                text.push_str(&format!(
                    "{mark}  {:width$}  {}\n",
                    check.name,
                    output::printable(&check.found)
                ));
                if let Some(repair) = &check.repair {
                    text.push_str(&format!("      {:width$}  repair: {repair}\n", ""));
                }
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_shows_the_command_that_repairs_it() {
        let checks = [
            Shown { name: "kvm".into(), state: State::Degraded, found: "no /dev/kvm".into(), repair: None },
            Shown {
                name: "qemu".into(),
                state: State::Bad,
                found: "not found".into(),
                repair: Some("apt-get install qemu-system-x86".into()),
            },
        ];
        let table = render(Format::Table, &checks);
        assert!(
            table.contains("BAD   qemu  not found\n            repair: apt-get install qemu-system-x86\n"),
            "{table}"
        );
        assert_eq!(render(Format::Name, &checks), "kvm\nqemu\n");
        let json: serde_json::Value = serde_json::from_str(&render(Format::Json, &checks)).unwrap();
        assert_eq!(json[1]["state"], "bad");
        assert_eq!(json[0]["repair"], serde_json::Value::Null);
    }
}
