//! `imp run`: image, VM, program, exit status.

mod begin;
pub(crate) mod env_file;
mod explain;
pub(crate) mod flags;
pub(crate) mod names;
mod restored;
pub(crate) mod spec;
#[cfg(test)]
mod spec_tests;
mod timings;

use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use imp_embedded::Owner;
use imp_embedded::client::{Attached, AttachedStdin, Attachment, Running};
use imp_protocol::process::Exit;
use imp_runtime::spec::{BaseDisk, CopiedMount, KernelChoice, Terminal, VmSpec};
use imp_runtime::status::{Outcome as VmOutcome, Stage, State, VmStatus};
use imp_storage::image::config::ImageConfig;
use tokio::signal::unix::SignalKind;

use begin::{Asked, Begun, Found};
pub(crate) use explain::explain;
pub(crate) use flags::Run;
use timings::Timings;

use crate::commands::image::source;
use crate::context::Context;
use crate::exit::{Failure, OWN_FAILURE, Outcome};
use crate::output;
use crate::progress::Detail;
use crate::session::{self, End, Interrupts, Program, Signals, Stdin, Wiring, Written, exit_status};
use crate::terminal;

/// How long the owner may be away while another takes over, in the midst of a run.
const OWNER_CHANGES: Duration = Duration::from_secs(30);

impl Run {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        self.checked_run(context).map_err(|error| Failure::of(OWN_FAILURE, error))
    }

    fn checked_run(self, context: &Context) -> anyhow::Result<u8> {
        if self.tty && self.interactive && !self.detach && !terminal::is_terminal(std::io::stdin()) {
            bail!("-t with -i needs a terminal, and the input is none; leave -t out to pipe something in");
        }
        let mut timings = Timings::start();
        if let Some(origin) = restored::Origin::of(&self) {
            return context.block_on(self.run_restored(context, origin, timings))?;
        }
        let prepared = self.prepare(context, &mut timings)?;
        context.block_on(self.run_vm(context, prepared, timings))?
    }

    /// The spec, and the holds on what it names until the VM itself holds it.
    fn prepare(&self, context: &Context, timings: &mut Timings) -> anyhow::Result<Prepared> {
        let image = self.image_and_command.first().and_then(|image| image.to_str());
        let image = image.context("the image's name is not UTF-8")?;
        let detail = if self.quiet { Detail::Quiet } else { Detail::Shown };
        let store = context.store()?;
        let taken = source::take(&store, image, self.machine.pull.into(), detail)?;
        let config: ImageConfig = store.inspect(&taken)?;
        timings.stage("image found");
        let display = crate::progress::Display::new(detail);
        let base = store.base_disk(&taken, &[], &display)?;
        timings.stage("disk found");
        let spec = self.spec(
            context,
            &config,
            BaseDisk { image: image.to_owned(), key: base.key.to_string(), path: base.path.clone() },
        )?;
        Ok(Prepared { spec, _base: base })
    }

    fn spec(&self, context: &Context, config: &ImageConfig, base: BaseDisk) -> anyhow::Result<VmSpec> {
        let world = spec::World {
            defaults: &context.settings.run,
            base,
            made_up_name: names::made_up()?,
            env_files: self.variables.of_files()?,
            host_env: &|name| std::env::var_os(name),
            mounts: self.mounts()?,
            terminal: terminal::size().map(|size| Terminal {
                rows: size.rows,
                columns: size.columns,
                term: size.term,
            }),
        };
        let spec = spec::spec(self, config, world)?;
        Ok(VmSpec { kernel: with_absolute_path(spec.kernel)?, ..spec })
    }

    fn mounts(&self) -> anyhow::Result<Vec<CopiedMount>> {
        let written =
            self.volumes.iter().map(|volume| &volume.0).chain(self.mounts.iter().map(|mount| &mount.0));
        written
            .map(|mount| {
                Ok(CopiedMount {
                    source: absolute(&mount.source, "what is to be copied in,")?,
                    ..mount.clone()
                })
            })
            .collect()
    }

    async fn run_vm(
        &self,
        context: &Context,
        prepared: Prepared,
        mut timings: Timings,
    ) -> anyhow::Result<u8> {
        // Before this, a signal ends the command: there is nothing yet that it would leave.
        let mut interrupts = Interrupts::catch()?;
        let mut owner = tokio::select! {
            owner = context.owner() => owner?,
            kind = interrupts.next() => return Ok(exit_status(kind)),
        };
        timings.stage("owner found");
        let mut made = None;
        let mut changes = 0;
        let (vm, start, begun) = loop {
            let (vm, mut asked) = match made.take() {
                Some(vm) => (vm, Asked::ToStart),
                None => match create(&owner, &prepared.spec, &mut interrupts).await? {
                    Created::Vm(vm) => (vm, Asked::NotYet),
                    Created::Interrupted { vm: Some(vm), kind } => {
                        return cancel(&owner, &vm, kind, &mut interrupts).await;
                    }
                    Created::Interrupted { vm: None, kind } => return Ok(exit_status(kind)),
                },
            };
            timings.stage("VM on record");
            let start = Instant::now();
            let begun = tokio::select! {
                begun = self.begin(&owner, &vm, &mut asked) => begun,
                kind = interrupts.next() => return cancel(&owner, &vm, kind, &mut interrupts).await,
            };
            match begun {
                Ok(begun) => break (vm, start, begun),
                Err(error) if error.is_lost() && changes < begin::MOST_CHANGES => {}
                Err(error) => return Err(error.into()),
            }
            changes += 1;
            owner = tokio::select! {
                owner = context.owner() => owner?,
                kind = interrupts.next() => return Ok(exit_status(kind)),
            };
            made = match begin::after_a_change(&owner, &vm, asked).await? {
                Found::GivenUp => None,
                Found::Itself => Some(vm),
            };
        };
        let (attached, running) = match begun {
            Begun::Detached => {
                return tokio::select! {
                    left = self.leave_running(&owner, &vm) => left,
                    kind = interrupts.next() => cancel(&owner, &vm, kind, &mut interrupts).await,
                };
            }
            Begun::Attached(attached, running) => (*attached, running),
        };
        let mut written = Written::default();
        let code = self.foreground(context, owner, &vm, attached, &mut interrupts, &mut written).await?;
        if let Some(running) = running {
            timings.vm_stages(start, &running.await.unwrap_or_default());
            if let Some(at) = written.first {
                timings.stage_at("first byte", at);
            }
            timings.stage("end known");
            output::say(timings.table().trim_end());
        }
        Ok(code)
    }

    /// Waits until the program runs: what cannot be started is this command's failure.
    async fn leave_running(&self, owner: &Owner, vm: &VmStatus) -> anyhow::Result<u8> {
        let mut status = owner.wait(vm.id.as_str(), State::Running).await?;
        if status.state != State::Running {
            // It went past running: how it ended is known once it has stopped.
            match owner.wait(vm.id.as_str(), State::Stopped).await {
                Ok(stopped) => status = stopped,
                // With --rm it may be gone by now, and so it had run.
                Err(error) if error.is_unknown_vm() => {}
                Err(error) => return Err(error.into()),
            }
        }
        match &status.outcome {
            Some(outcome @ (VmOutcome::Failed { .. } | VmOutcome::NotStarted { .. })) => {
                explain(&status);
                Ok(outcome.exit_code())
            }
            Some(
                VmOutcome::Exited { .. }
                | VmOutcome::Signalled { .. }
                | VmOutcome::PoweredOff
                | VmOutcome::Killed,
            )
            | None => {
                output::print(&format!("{}\n", vm.id))?;
                Ok(0)
            }
        }
    }

    /// Output from this position on; absent: from now on.
    fn attachment(&self, from_offset: Option<u64>) -> Attachment {
        let stdin = match (self.interactive, self.tty) {
            (false, _) => AttachedStdin::None,
            // A terminal is left and come back to.
            (true, true) => AttachedStdin::Shared,
            (true, false) => AttachedStdin::Once,
        };
        Attachment { stdin, from_offset }
    }

    /// Where the output goes on for another owner; what of it was there before a snapshot is not counted here.
    fn offset(&self, written: &Written) -> Option<u64> {
        restored::Origin::of(self).is_none().then_some(written.bytes)
    }

    async fn foreground(
        &self,
        context: &Context,
        mut owner: Owner,
        vm: &VmStatus,
        attached: Attached,
        interrupts: &mut Interrupts,
        written: &mut Written,
    ) -> anyhow::Result<u8> {
        let wiring = Wiring {
            stdin: if self.interactive { Stdin::Sent } else { Stdin::None },
            terminal: if self.tty { session::Terminal::Own } else { session::Terminal::None },
            signals: if self.sig_proxy { Signals::PassedOn } else { Signals::Kept },
            reader: session::Reader::Only,
            detach_keys: self.detach_keys.clone(),
        };
        let mut program = Program::Main(Box::new(attached));
        let mut comes_back = false;
        loop {
            let end = match session::run(&mut program, &wiring, interrupts, written).await {
                Ok(end) => end,
                // Input that was on its way may be lost with the owner; output is not: the guest keeps it.
                Err(error) if is_lost(&error) && !self.interactive => {
                    owner = tokio::select! {
                        owner = tokio::time::timeout(OWNER_CHANGES, context.owner()) => {
                            owner.unwrap_or(Err(error))?
                        }
                        kind = interrupts.next() => return Ok(left_running(vm, kind)),
                    };
                    program = Program::Main(Box::new(
                        owner.attach(vm.id.as_str(), self.attachment(self.offset(written))).await?,
                    ));
                    comes_back = true;
                    continue;
                }
                Err(error) => {
                    return Err(
                        error.context(format!("lost sight of {}; it may still run: see `imp ps`", vm.name))
                    );
                }
            };
            let is_over = matches!(end, End::Exited(_));
            let code = self.conclude(&owner, vm, end, interrupts).await?;
            if comes_back && is_over && self.rm {
                // It waited for whoever was attached; an error says that it has gone by itself.
                let _ = owner.remove(vm.id.as_str(), Running::Refuse).await;
            }
            return Ok(code);
        }
    }

    async fn conclude(
        &self,
        owner: &Owner,
        vm: &VmStatus,
        end: End,
        interrupts: &mut Interrupts,
    ) -> anyhow::Result<u8> {
        match end {
            End::Exited(exit) => {
                if let Exit::NotStarted { reason, .. } = &exit {
                    output::complain(&format!("the program could not be started: {reason}"));
                }
                if let Exit::Signal { out_of_memory: true, .. } = exit {
                    output::warn(
                        "the program was killed because the guest ran out of memory; give it more with -m",
                    );
                }
                if self.rm {
                    // The machine still goes down, also when nobody waits for it; an error says that it is gone already.
                    tokio::select! {
                        _ = owner.wait(vm.id.as_str(), State::Stopped) => {}
                        _ = interrupts.next() => {}
                    }
                }
                Ok(exit.code())
            }
            End::Failed(status) => {
                explain(&status);
                Ok(OWN_FAILURE)
            }
            End::Detached => {
                output::say(&format!("\ndetached; `imp attach {}` goes back", vm.name));
                Ok(0)
            }
            End::Interrupted(kind) => cancel(owner, vm, kind, interrupts).await,
            End::LeftRunning(kind) => Ok(left_running(vm, kind)),
            End::BrokenPipe => Err(crate::exit::nobody_reads().into()),
        }
    }
}

/// What came of the creation of a VM.
enum Created {
    Vm(VmStatus),
    /// A signal came meanwhile; without a VM, two.
    Interrupted {
        vm: Option<VmStatus>,
        kind: SignalKind,
    },
}

/// Not called off half way: what was made must be known, to be removed. A second signal does not wait for that.
async fn create(owner: &Owner, spec: &VmSpec, interrupts: &mut Interrupts) -> anyhow::Result<Created> {
    let mut creation = pin!(owner.create(spec));
    let mut interrupted = None;
    loop {
        tokio::select! {
            vm = &mut creation => {
                let vm = vm?;
                return Ok(match interrupted {
                    None => Created::Vm(vm),
                    Some(kind) => Created::Interrupted { vm: Some(vm), kind },
                });
            }
            kind = interrupts.next() => match interrupted {
                None => interrupted = Some(kind),
                Some(kind) => return Ok(Created::Interrupted { vm: None, kind }),
            },
        }
    }
}

/// Takes a VM away whose program has not started. A second signal does not wait for that.
async fn cancel(
    owner: &Owner,
    vm: &VmStatus,
    kind: SignalKind,
    interrupts: &mut Interrupts,
) -> anyhow::Result<u8> {
    tokio::select! {
        removed = owner.remove(vm.id.as_str(), Running::EndFirst) => if let Err(error) = removed {
            output::warn(&format!("{error:#}; `imp rm -f {}` removes the VM", vm.name));
        },
        _ = interrupts.next() => {
            output::warn(&format!("the VM may be left; `imp rm -f {}` removes it", vm.name));
        }
    }
    Ok(exit_status(kind))
}

fn left_running(vm: &VmStatus, kind: SignalKind) -> u8 {
    output::say(&format!("{} goes on; `imp kill {}` ends it", vm.name, vm.name));
    exit_status(kind)
}

struct Prepared {
    spec: VmSpec,
    _base: imp_storage::store::BaseDisk,
}

/// The stages of a VM up to its running; none if they cannot be found out any more.
async fn until_running(owner: Owner, id: String) -> Vec<Stage> {
    owner.wait(&id, State::Running).await.map_or_else(|_| Vec::new(), |status| status.stages)
}

/// The owner works from another directory.
pub(crate) fn with_absolute_path(kernel: KernelChoice) -> anyhow::Result<KernelChoice> {
    Ok(match kernel {
        KernelChoice::File(path) => KernelChoice::File(absolute(&path, "the kernel")?),
        other @ (KernelChoice::Default | KernelChoice::Bundle(_)) => other,
    })
}

fn absolute(path: &Path, what: &str) -> anyhow::Result<std::path::PathBuf> {
    let absolute = std::fs::canonicalize(path).with_context(|| format!("{what} {}", path.display()))?;
    if absolute.to_str().is_none() {
        bail!("{what} {} has a name that is not UTF-8", path.display());
    }
    Ok(absolute)
}

pub(crate) fn is_lost(error: &anyhow::Error) -> bool {
    error.downcast_ref::<imp_embedded::client::Error>().is_some_and(imp_embedded::client::Error::is_lost)
}
