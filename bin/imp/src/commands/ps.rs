//! `imp ps`

use std::collections::BTreeMap;
use std::time::SystemTime;

use clap::Args;
use imp_runtime::Digest;
use imp_runtime::status::{Outcome as VmOutcome, Secrets, State, VmStatus};
use serde::Serialize;

use crate::commands::suspend;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output::{Listing, Row};
use crate::value::{show_age, show_span, show_time};

/// List VMs
///
/// Those that wait in a pool are nobody's yet: they are listed with --prepared, and counted by `imp pool ls`.
#[derive(Debug, Args)]
#[command(visible_alias = "list")]
pub(crate) struct Ps {
    /// Those that have stopped too
    #[arg(short, long)]
    all: bool,
    /// Those that are prepared for somebody, as in a pool, and no others
    #[arg(long, conflicts_with_all = ["all", "suspended"])]
    prepared: bool,
    /// Those that `imp suspend` has put away, and no others
    #[arg(long, conflicts_with = "all")]
    suspended: bool,
    #[command(flatten)]
    listing: Listing,
}

/// A VM as it is listed.
#[derive(Debug, Serialize)]
pub(crate) struct Shown {
    pub(crate) id: String,
    pub(crate) name: String,
    image: String,
    command: Vec<String>,
    state: State,
    /// Present once the VM has stopped.
    exit_code: Option<u8>,
    created: String,
    started: Option<String>,
    ended: Option<String>,
    ports: Vec<String>,
    labels: BTreeMap<String, String>,
    /// Digest of the snapshot that it was made of; absent: it booted.
    made_of: Option<Digest>,
    /// Whether its guest was given secrets, or comes from one that was.
    holds_secrets: bool,
    #[serde(skip)]
    status: String,
    #[serde(skip)]
    age: String,
}

impl Shown {
    pub(crate) fn new(vm: &VmStatus, now: SystemTime) -> Self {
        Self {
            id: vm.id.to_string(),
            name: vm.name.to_string(),
            image: vm.image.clone(),
            command: vm.command.clone(),
            state: vm.state,
            exit_code: vm.outcome.as_ref().map(VmOutcome::exit_code),
            created: show_time(vm.created),
            started: vm.started.map(show_time),
            ended: vm.ended.map(show_time),
            // What has stopped listens on nothing.
            ports: vm
                .ports
                .iter()
                .filter(|_| vm.state != State::Stopped)
                .map(|port| format!("{}->{}/tcp", port.host, port.guest))
                .collect(),
            labels: vm.labels.clone(),
            made_of: vm.made_of,
            holds_secrets: vm.secrets == Secrets::Held,
            status: status(vm, now),
            age: show_age(vm.created, now),
        }
    }
}

/// "running for 3 minutes", "exited (1) 2 hours ago".
fn status(vm: &VmStatus, now: SystemTime) -> String {
    let since = |time: Option<SystemTime>| now.duration_since(time.unwrap_or(now)).unwrap_or_default();
    match vm.state {
        State::Created => "created".to_owned(),
        State::Starting => "starting".to_owned(),
        State::Prepared => "prepared".to_owned(),
        State::Asleep => "asleep".to_owned(),
        State::Paused => "paused".to_owned(),
        State::Running => format!("running for {}", show_span(since(vm.started))),
        State::Stopping => "stopping".to_owned(),
        State::Stopped => {
            let how = match &vm.outcome {
                Some(VmOutcome::Exited { code }) => format!("exited ({code})"),
                Some(VmOutcome::Signalled { signal, .. }) => format!("ended by signal {signal}"),
                Some(VmOutcome::NotStarted { code, .. }) => format!("not started ({code})"),
                Some(VmOutcome::Killed) => "killed".to_owned(),
                Some(VmOutcome::PoweredOff) => "powered off".to_owned(),
                Some(VmOutcome::Failed { .. }) => "failed".to_owned(),
                None => "stopped".to_owned(),
            };
            format!("{how} {} ago", show_span(since(vm.ended)))
        }
    }
}

impl Row for Shown {
    const HEADINGS: &'static [&'static str] =
        &["ID", "NAME", "IMAGE", "COMMAND", "CREATED", "STATUS", "MADE OF", "PORTS"];

    fn cells(&self) -> Vec<String> {
        let command = self.command.join(" ");
        let command = if command.chars().count() > 30 {
            command.chars().take(29).chain(['…']).collect()
        } else {
            command
        };
        vec![
            self.id.chars().take(12).collect(),
            self.name.clone(),
            self.image.clone(),
            command,
            self.age.clone(),
            self.status.clone(),
            self.made_of.map_or_else(|| "-".to_owned(), |snapshot| snapshot.short()),
            self.ports.join(", "),
        ]
    }

    fn id(&self) -> String {
        self.id.clone()
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

impl Ps {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        if self.suspended {
            return self.list_suspended(context);
        }
        let vms = context.block_on(async {
            match context.owner_if_any().await? {
                Some(owner) => anyhow::Ok(owner.list().await?),
                None => Ok(Vec::new()),
            }
        })??;
        let now = SystemTime::now();
        let listed = vms.iter().filter(|vm| self.lists(vm.state));
        self.listing.print(&listed.map(|vm| Shown::new(vm, now)).collect::<Vec<_>>())?;
        Ok(0)
    }

    fn lists(&self, state: State) -> bool {
        match state {
            // Nobody has it yet: `imp stop $(imp ps -q)` is not meant for it. In any other state it may be somebody's, also
            // one that a pool has made.
            State::Prepared => self.prepared,
            State::Stopped => self.all,
            State::Created
            | State::Starting
            | State::Running
            | State::Asleep
            | State::Paused
            | State::Stopping => !self.prepared,
        }
    }

    fn list_suspended(self, context: &Context) -> Outcome {
        let suspended =
            context.block_on(async { anyhow::Ok(context.owner().await?.suspended().await?) })??;
        let now = SystemTime::now();
        let shown = suspended.into_iter().map(|one| suspend::Shown::new(one, now));
        self.listing.print(&shown.collect::<Vec<_>>())?;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        ps: Ps,
    }

    #[test]
    fn only_a_vm_that_is_prepared_is_nobodys_and_is_listed_with_no_other() {
        let line = |flags: &[&str]| Line::try_parse_from([&["ps"], flags].concat()).unwrap().ps;
        let [plain, all, prepared] = [line(&[]), line(&["-a"]), line(&["--prepared"])];
        let lives =
            [State::Created, State::Starting, State::Running, State::Asleep, State::Paused, State::Stopping];
        let table = lives.map(|state| (state, [true, true, false]));
        let rest = [(State::Prepared, [false, false, true]), (State::Stopped, [false, true, false])];
        for (state, listed) in table.into_iter().chain(rest) {
            assert_eq!([&plain, &all, &prepared].map(|ps| ps.lists(state)), listed, "{state}");
        }
    }
}
