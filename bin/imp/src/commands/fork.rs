//! `imp fork`

use clap::{Args, ValueEnum};
use imp_embedded::client::Forked;
use imp_runtime::WithSecrets;
use imp_runtime::spec::{Child, Identity, WhenStopped};
use serde::Serialize;

use crate::commands::run::flags::{Published, Secrets, Variables};
use crate::commands::run::names;
use crate::commands::run::spec;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Make children of a running VM: each goes on from where it is now, as a machine of its own
///
/// They share the parent's memory until they write to it, and have a copy of its disk. The parent stands still while its
/// memory is written, and goes on whatever becomes of the children. Connections of the parent to others are closed in a
/// child, and calls to the parent's guest that are under way, as of `imp exec`, end with an error.
#[derive(Debug, Args)]
pub(crate) struct Fork {
    /// Name, id, or the beginning of an id
    vm: String,
    /// How many children
    #[arg(short = 'n', long, value_name = "COUNT", allow_hyphen_values = true,
          default_value = "1", value_parser = clap::value_parser!(u16).range(1..=1000))]
    count: u16,
    /// Name of the child, or, of several, what their names begin with [default: made up]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A label of each; may be repeated
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// Lead a port of this machine to one of the child; for one child, or without HOST-PORT. May be repeated
    #[arg(short, long = "publish", value_name = "[[ADDRESS:]HOST-PORT:]GUEST-PORT")]
    publish: Vec<Published>,
    /// Remove each with its disk and logs when its program has ended
    #[arg(long)]
    rm: bool,
    #[command(flatten)]
    variables: Variables,
    #[command(flatten)]
    secrets: Secrets,
    /// Also if the VM holds secrets: each child has them then
    #[arg(long)]
    with_secrets: bool,
    /// More than the ids of the children
    #[arg(short, long, value_enum, value_name = "FORM")]
    output: Option<Form>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// One JSON document: the children, and how long the parent stood still
    Json,
    /// One name in each line
    Name,
}

/// What became of a fork.
#[derive(Debug, Serialize)]
struct Shown {
    /// How long the parent stood still.
    paused_milliseconds: f64,
    children: Vec<ShownChild>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum ShownChild {
    Up { id: String, name: String },
    Failed { error: String },
}

impl Fork {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let children = self.children()?;
        let secrets = if self.with_secrets { WithSecrets::Allowed } else { WithSecrets::Refused };
        let forked = context.block_on(async {
            let owner = context.owner().await?;
            anyhow::Ok(owner.fork(&self.vm, &children, secrets).await?)
        })??;
        let shown = Shown::new(forked);
        output::print(&shown.text(self.output))?;
        let mut code = 0;
        for child in &shown.children {
            if let ShownChild::Failed { error } = child {
                output::complain(&format!("a child did not come up: {error}"));
                code = 1;
            }
        }
        Ok(code)
    }

    fn children(&self) -> anyhow::Result<Vec<(Child, Identity)>> {
        let labels = spec::labels(&Default::default(), &self.labels)?;
        let identity = Identity {
            hostname: None,
            environment: self.variables.environment(|name| std::env::var_os(name))?,
            secrets: self.secrets.environment(|name| std::env::var_os(name))?,
        };
        let child = |number| {
            let child = Child {
                labels: labels.clone(),
                ports: self.publish.iter().map(|port| port.0).collect(),
                when_stopped: if self.rm { WhenStopped::Remove } else { WhenStopped::Keep },
                ..Child::named(self.name(number)?.parse()?)
            };
            anyhow::Ok((child, identity.clone()))
        };
        (1..=self.count).map(child).collect()
    }

    fn name(&self, number: u16) -> anyhow::Result<String> {
        match &self.name {
            None => names::made_up(),
            Some(name) if self.count == 1 => Ok(name.clone()),
            Some(name) => Ok(format!("{name}-{number}")),
        }
    }
}

impl Shown {
    fn new(forked: Forked) -> Self {
        let children = forked.children.into_iter().map(|child| match child {
            Ok(vm) => ShownChild::Up { id: vm.id.to_string(), name: vm.name.to_string() },
            Err(error) => ShownChild::Failed { error },
        });
        Self { paused_milliseconds: forked.paused.as_secs_f64() * 1000.0, children: children.collect() }
    }

    fn text(&self, form: Option<Form>) -> String {
        let lines = |line: fn(&ShownChild) -> Option<&str>| -> String {
            self.children.iter().filter_map(line).map(|line| format!("{line}\n")).collect()
        };
        match form {
            Some(Form::Json) => output::json(self),
            Some(Form::Name) => lines(|child| match child {
                ShownChild::Up { name, .. } => Some(name),
                ShownChild::Failed { .. } => None,
            }),
            None => lines(|child| match child {
                ShownChild::Up { id, .. } => Some(id),
                ShownChild::Failed { .. } => None,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_names_and_the_time_of_the_pause_are_told() {
        let up = ShownChild::Up { id: "00ff".into(), name: "one".into() };
        let failed = ShownChild::Failed { error: "no room".into() };
        let shown = Shown { paused_milliseconds: 1.5, children: vec![up, failed] };
        assert_eq!((shown.text(None), shown.text(Some(Form::Name))), ("00ff\n".into(), "one\n".into()));
        let json: serde_json::Value = serde_json::from_str(&shown.text(Some(Form::Json))).unwrap();
        assert_eq!(json["paused_milliseconds"], 1.5);
        assert_eq!(
            (&json["children"][0]["name"], &json["children"][1]["error"]),
            (&"one".into(), &"no room".into())
        );
    }
}
