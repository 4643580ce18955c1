//! Carries out the commands of the lifecycle; each reports what came of it.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use imp_network::names::TAP;
use imp_protocol::causes::chain;
use imp_protocol::connection::Connection;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Message, Prepared, Vm, after, spawn};
use crate::boot::COMMAND_LINE;
use crate::guest::{self, GuestHold, Lanes, Request};
use crate::ledger;
use crate::lifecycle::{Command, Input, Phase};
use crate::network::Network;
use crate::process::Process;
use crate::spec::Balloon;
use crate::status::{Failure, LostOutput};
use crate::vmm::{
    self, Access, Attachment, BootConfig, Drive, DriveLimit, Machine, NetworkDevice, NetworkLimit,
};
use crate::{cgroup, changes};

/// By then the end of a VMM that has closed its sockets is seen, also on a busy machine.
const END_IS_SEEN: Duration = Duration::from_secs(5);
/// A call that failed because its connection broke is told a moment before the connection says so.
const BREAK_IS_SEEN: Duration = Duration::from_millis(100);

impl Vm {
    pub(super) fn carry_out(&mut self, command: Command) {
        match command {
            Command::Prepare => self.prepare(),
            Command::Spawn => self.launch(),
            Command::Greet => self.greet(),
            Command::Configure => self.configure(),
            Command::CopyIn => self.copy_in(),
            Command::Initialise => self.initialise(),
            Command::Wake => self.wake(),
            Command::Sleep => self.sleep(),
            Command::Save => self.save(),
            Command::Pause => self.pause(),
            Command::Attach => self.take_over_machine(),
            Command::Rouse => self.rouse(),
            Command::StartMain => {
                let main = &self.record.spec.main;
                self.follow_main(Request::start(main, self.record.spec.limits.processes));
            }
            Command::FollowMain => self.follow_main(Request::Attach),
            Command::Reconnect => self.reconnect(),
            Command::SignalMain => self.signal_main(),
            Command::Drain => {
                self.holders.close();
                let (holders, messages) = (self.holders.clone(), self.messages.clone());
                self.step = Some(spawn(async move {
                    holders.wait().await;
                    let _ = messages.send(Message::Happened(Input::Drained));
                }));
            }
            Command::ShutDown => self.shut_down(),
            Command::KillVmm => {
                self.step = None;
                if let Some(vmm) = &self.vmm {
                    vmm.kill();
                }
                if self.exit_watch.is_none() {
                    self.watch_unattached();
                }
            }
            Command::CleanUp => self.clean_up(),
            Command::Arm(deadline, time) => {
                self.deadlines.retain(|(armed, _)| *armed != deadline);
                let input = Input::DeadlinePassed(deadline);
                self.deadlines.push((deadline, after(time, self.messages.clone(), input)));
            }
        }
    }

    /// Starts the VMM's process and puts it under its limits before it takes any of the guest's memory.
    fn launch(&mut self) {
        let Some(prepared) = self.prepared.take() else { return };
        self.record.changes = changes::noted(&self.record.origin, self.driver.capabilities().snapshots);
        let spec = &self.record.spec;
        let Prepared { origin, network, .. } = *prepared;
        let attachment = network.map(|network| match network {
            Network::Passt(passt) => Attachment::Stream(passt.socket),
            Network::Bridge { namespace, network, name_server } => {
                self.record.bridge = Some(*network);
                self.name_server = Some(name_server);
                Attachment::Tap { name: TAP.to_owned(), namespace }
            }
        });
        let network = attachment.zip(self.record.status.network.mac.clone());
        let network_limit = NetworkLimit {
            bytes_per_second: spec.limits.network_bytes_per_second,
            packets_per_second: spec.limits.network_packets_per_second,
        };
        let boot = BootConfig {
            id: self.id.to_string(),
            user: self.record.status.vmm_user,
            origin,
            changes: self.record.changes,
            cpus: spec.cpus,
            memory: spec.memory,
            command_line: COMMAND_LINE.to_owned(),
            drives: vec![
                Drive { id: "base", path: spec.base.path.clone(), access: Access::ReadOnly },
                Drive { id: "scratch", path: self.layout.scratch(), access: Access::Private },
            ],
            drive_limit: DriveLimit {
                bytes_per_second: spec.limits.disk_bytes_per_second,
                requests_per_second: spec.limits.disk_requests_per_second,
            },
            network: network.map(|(attachment, mac)| NetworkDevice { mac, attachment, limit: network_limit }),
            balloon: spec.balloon,
        };
        let (driver, layout) = (Arc::clone(&self.driver), self.layout.clone());
        // Only those that could be made: what refused to be made has been told of.
        let cgroups = self.record.cgroups.iter().filter(|group| group.is_dir()).cloned().collect::<Vec<_>>();
        let messages = self.messages.clone();
        // Not ended half way: what has been started must be known.
        tokio::task::spawn_blocking(move || {
            let message = match driver.spawn(&boot, &layout) {
                Ok(process) => {
                    let refused = cgroup::enter(&cgroups, process.pid());
                    Message::Launched(process, Box::new(boot), refused)
                }
                Err(error) => Message::Happened(Input::Failed(Failure::Spawn { detail: chain(&error) })),
            };
            let _ = messages.send(message);
        });
    }

    pub(super) fn boot(&mut self, boot: Box<BootConfig>, process: Process) {
        let (driver, layout) = (Arc::clone(&self.driver), self.layout.clone());
        self.attach(async move { driver.begin(&boot, &layout, process).await });
    }

    pub(super) fn attach(
        &mut self,
        machine: impl Future<Output = Result<Box<dyn Machine>, vmm::Error>> + Send + 'static,
    ) {
        let messages = self.messages.clone();
        self.step = Some(spawn(async move {
            let message = match machine.await {
                Ok(machine) => Message::Attached(Arc::from(machine)),
                Err(error) => Message::Happened(Input::Failed(Failure::Spawn { detail: chain(&error) })),
            };
            let _ = messages.send(message);
        }));
    }

    pub(super) fn greet(&mut self) {
        let Some(machine) = self.machine.clone() else { return };
        let (messages, guest) = (self.messages.clone(), self.guest());
        let boots = self.phase == Phase::Answering;
        self.step = Some(spawn(async move {
            let (connection, agent, channel) = match guest::greet(machine.as_ref()).await {
                Ok(greeted) => greeted,
                Err(error) => return guest.tell(Input::Failed(setup(&error))),
            };
            if boots && let Err(error) = machine.answered().await {
                return guest.broken(&connection, Input::Failed(setup(&error))).await;
            }
            let _ = messages.send(Message::Answered(connection, agent, channel));
        }));
    }

    /// As `greet`, for a machine that may have to be attached to first: it was started by another owner.
    fn reconnect(&mut self) {
        self.connection.send_replace(None);
        self.loss_watch = None;
        // Whoever still uses the old channel would keep it: a VMM serves one client at a time.
        self.channel = None;
        if self.machine.is_some() {
            return self.greet();
        }
        if let Some(process) = self.vmm.clone() {
            let (driver, layout) = (Arc::clone(&self.driver), self.layout.clone());
            self.attach(async move { driver.adopt(&layout, process).await });
        }
    }

    /// What it was given by its snapshot, or by another owner, is the machine's to say.
    pub(super) fn look_at_balloon(&self) {
        let Some(machine) = self.machine.clone() else { return };
        if self.record.spec.balloon == Balloon::Without {
            return;
        }
        let (messages, id) = (self.messages.clone(), self.id.clone());
        tokio::spawn(async move {
            match machine.balloon().await {
                Ok(Some(facts)) => drop(messages.send(Message::Balloon(facts))),
                Ok(None) => {}
                Err(error) => tracing::warn!(vm = %id, error = chain(&error), "its balloon is not seen"),
            }
        });
    }

    fn configure(&mut self) {
        let (spec, network) = (self.record.spec.clone(), self.record.status.network.clone());
        self.call(Input::Configured, async move |connection| {
            guest::configure(&connection, &spec, &network).await
        });
    }

    fn copy_in(&mut self) {
        let mounts = self.record.spec.mounts.clone();
        let (machine, only, token) = (self.machine.clone(), Arc::clone(&self.lane), self.holders.token());
        self.call(Input::CopiedIn, async move |connection| {
            let guest = GuestHold::new(connection.clone(), token);
            let lanes = machine.map(|machine| Lanes { machine, guest, only });
            for mount in &mounts {
                let lane = match &lanes {
                    Some(lanes) => lanes.open().await,
                    None => None,
                };
                guest::copy_in(&connection, lane, mount).await.map_err(|error| error.of_copy(mount))?;
            }
            Ok(())
        });
    }

    /// Runs what a template begins with, before its main process.
    fn initialise(&mut self) {
        let Some(connection) = self.connection.borrow().clone() else { return };
        let (commands, guest) = (Arc::clone(&self.initial), self.guest());
        let main = self.record.spec.main.clone();
        self.step = Some(spawn(async move {
            for command in commands.iter() {
                match crate::template::init::run(&connection, command, &main).await {
                    Ok(()) => {}
                    Err(failure) => return guest.broken(&connection, Input::Failed(failure)).await,
                }
            }
            guest.tell(Input::Initialised);
        }));
    }

    fn signal_main(&mut self) {
        let Some(connection) = self.connection.borrow().clone() else { return };
        let signal = self.record.spec.main.stop_signal.clone();
        let id = self.id.clone();
        // Beside the step that follows the main process.
        tokio::spawn(async move {
            if let Err(error) = guest::signal_main(&connection, &signal).await {
                tracing::warn!(vm = %id, error = chain(&error), "the main process could not be signalled");
            }
        });
    }

    fn shut_down(&mut self) {
        let Some(connection) = self.connection.borrow().clone() else {
            let _ = self.messages.send(Message::Happened(Input::Failed(Failure::ChannelLost { seconds: 0 })));
            return;
        };
        // From here on the guest goes down, and its connection with it.
        self.loss_watch = None;
        let messages = self.messages.clone();
        self.step = Some(spawn(async move {
            if let Err(error) = guest::shut_down(&connection).await {
                let _ = messages.send(Message::Happened(Input::Failed(setup(&error))));
            }
        }));
    }

    /// A call to the guest that leads to `then`, or to a failure of the VM.
    fn call<C, F>(&mut self, then: Input, call: C)
    where
        C: FnOnce(Connection) -> F + Send + 'static,
        F: Future<Output = Result<(), guest::Error>> + Send + 'static,
    {
        let Some(connection) = self.connection.borrow().clone() else { return };
        let guest = self.guest();
        self.step = Some(spawn(async move {
            match call(connection.clone()).await {
                Ok(()) => guest.tell(then),
                Err(error) => guest.broken(&connection, Input::Failed(setup(&error))).await,
            }
        }));
    }

    /// The name server of a VM that another owner started.
    pub(super) async fn answer_names_again(&mut self) {
        let Some(bridge) = self.record.bridge.clone() else { return };
        let context = Arc::clone(&self.context);
        let started = tokio::task::spawn_blocking(move || context.bridges.name_server(&bridge)).await;
        match started {
            Ok(Ok(name_server)) => self.name_server = Some(name_server),
            Ok(Err(error)) => tracing::error!(vm = %self.id, error = chain(&error), "names do not resolve"),
            Err(_) => {}
        }
    }

    /// The ports of a VM that another owner started. One that is taken meanwhile is lost, the VM is not.
    pub(super) async fn publish_again(&mut self) {
        for facts in std::mem::take(&mut self.record.status.ports) {
            let Some(guest) = std::num::NonZeroU16::new(facts.guest) else { continue };
            let port = crate::spec::PublishedPort { host: facts.host, guest };
            let published = match self.record.bridge {
                Some(_) => crate::ports::reserve(port),
                None => crate::ports::publish(port, self.connection.subscribe()).await,
            };
            match published {
                Ok(published) => {
                    self.record.status.ports.push(published.facts.clone());
                    self.ports.push(published);
                }
                Err(error) => tracing::error!(vm = %self.id, %error, "a published port is lost"),
            }
        }
    }

    pub(super) fn guest(&self) -> Told {
        Told { messages: self.messages.clone(), vmm: self.vmm.clone() }
    }

    /// The record as it must be before anything of the VM exists.
    pub(super) fn about_to_start(&mut self) {
        self.record.stage = ledger::Stage::Starting { vmm_program: self.driver.program().to_owned() };
        self.record.cgroups = cgroup::planned(&self.id);
    }
}

/// Tells what came of a guest's calls.
pub(super) struct Told {
    pub(super) messages: mpsc::UnboundedSender<Message>,
    pub(super) vmm: Option<Process>,
}

impl Told {
    pub(super) fn tell(&self, input: Input) {
        let _ = self.messages.send(Message::Happened(input));
    }

    pub(super) fn lost(&self, lost: LostOutput) {
        let _ = self.messages.send(Message::Lost(lost));
    }

    /// A channel breaks a moment before the end of its VMM is seen. That end says more, and is told by who watches it.
    pub(super) async fn broken(&self, connection: &Connection, input: Input) {
        let broke = timeout(BREAK_IS_SEEN, connection.closed()).await.is_ok();
        let ended = match &self.vmm {
            Some(vmm) if broke => timeout(END_IS_SEEN, vmm.gone()).await.is_ok(),
            Some(_) | None => false,
        };
        if !ended {
            self.tell(input);
        }
    }
}

pub(super) fn setup(error: &(dyn Error + 'static)) -> Failure {
    Failure::Setup { detail: chain(error) }
}
