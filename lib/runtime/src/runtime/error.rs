//! Why the engine did not do what it was asked for.

use std::path::PathBuf;

use imp_storage::blob::digest::Digest;

use super::NotReclaimed;
use crate::admission::Refusal;
use crate::id::VmId;
use crate::spec::VmName;
use crate::status::{Outcome, State};
use crate::{boot, ledger, logs, network, pins, ports, process, vm, vmm};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no VM {name:?}; `imp ps -a` lists all")]
    NoSuchVm { name: String },
    #[error("{name:?} fits more than one VM; use more digits of its id")]
    Ambiguous { name: String },
    #[error("there is a VM {name} already: choose another --name, or remove it with `imp rm {name}`")]
    NameTaken { name: VmName },
    #[error(
        "VM {name} does not go on while another VM has its name: remove that one by its id, which `imp ps -a` shows, \
         then `imp resume {name}`"
    )]
    NameTakenMeanwhile { name: VmName },
    #[error(transparent)]
    Port(#[from] ports::Error),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("VM {id} is {state}: only a created VM can be started")]
    NotCreated { id: VmId, state: State },
    #[error("VM {id} is {state}: its guest cannot be reached")]
    NotReachable { id: VmId, state: State },
    #[error("VM {id} is not removed")]
    NotRemoved {
        id: VmId,
        #[source]
        source: vm::NotRemoved,
    },
    #[error("VM {id} is not activated")]
    NotActivated {
        id: VmId,
        #[source]
        source: vm::NotActivated,
    },
    #[error("the VM did not come up: {outcome}")]
    NotPrepared { outcome: Outcome },
    #[error("no snapshot is made of VM {id}")]
    NotSaved {
        id: VmId,
        #[source]
        source: vm::RestError,
    },
    #[error("no snapshot is made of VM {id}")]
    NotWhole {
        id: VmId,
        #[source]
        source: crate::changes::Error,
    },
    #[error("VM {id} is not paused")]
    NotPaused {
        id: VmId,
        #[source]
        source: vm::RestError,
    },
    #[error("VM {id} does not go on")]
    NotResumed {
        id: VmId,
        #[source]
        source: vm::RestError,
    },
    #[error("{} is no VM that is put away: `imp ps --suspended` lists those that are", snapshot.short())]
    NotSuspended { snapshot: Digest },
    #[error("VM {id} holds secrets, which each child would have, too: fork it --with-secrets if they may")]
    HoldsSecrets { id: VmId },
    #[error("VM {id} holds secrets, which would be on disk: suspend it --with-secrets if they may")]
    SecretsOnDisk { id: VmId },
    #[error(
        "{driver} makes no snapshots: have another driver run the machine (IMP_DRIVER; `imp doctor` shows which work)"
    )]
    NoSnapshots { driver: String },
    #[error("the snapshot was made in {vmm}, which does not run VMs here: `imp doctor` says why")]
    NoVmm { vmm: String },
    #[error("the snapshot {} does not say what is in it", snapshot.short())]
    Configuration {
        snapshot: Digest,
        #[source]
        source: serde_json::Error,
    },
    #[error("the snapshot {} is of one machine, and no template: `imp template ls` lists those", snapshot.short())]
    NotATemplate { snapshot: Digest },
    #[error("the snapshot {} contradicts itself; remove it, and make or pull it again", snapshot.short())]
    Contradiction { snapshot: Digest },
    #[error("no VM is made of the snapshot {}", snapshot.short())]
    NoBase {
        snapshot: Digest,
        #[source]
        source: Box<imp_storage::snapshots::base::Error>,
    },
    #[error(transparent)]
    NotDescribed(#[from] crate::restore::NotDescribed),
    #[error(transparent)]
    Snapshots(#[from] Box<imp_storage::snapshots::Error>),
    #[error(transparent)]
    NetworkRefused(#[from] network::Refused),
    #[error("the VM cannot have a bridge network")]
    Bridge(#[from] network::bridge::Error),
    #[error(transparent)]
    Kernel(#[from] boot::Error),
    #[error(transparent)]
    Pins(#[from] pins::Error),
    #[error(
        "{driver} does not limit what goes over a network: leave --network-bps and --network-pps out, or use Firecracker"
    )]
    NoNetworkLimits { driver: String },
    #[error("{driver} has no balloon for a guest's memory: leave --balloon out, or use Firecracker")]
    NoBalloons { driver: String },
    #[error("VM {id} gives no memory back")]
    NotReclaimed {
        id: VmId,
        #[source]
        source: NotReclaimed,
    },
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    #[error(transparent)]
    Logs(#[from] logs::Error),
    #[error("another process owns the VMs in {}", path.display())]
    Owned { path: PathBuf },
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot open the image store")]
    Store(#[source] Box<imp_storage::store::Error>),
    #[error("every user that a VM may run as has one: remove VMs that have stopped with `imp prune`")]
    NoUser,
    #[error(transparent)]
    Driver(#[from] vmm::drivers::Error),
    #[error(transparent)]
    Process(#[from] process::Error),
    #[error("the task was ended")]
    Ended,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_told_what_to_do_next() {
        let (snapshot, driver) = (Digest::of(b"1"), "qemu".to_owned());
        let errors = [
            Error::NameTakenMeanwhile { name: "vm".parse().unwrap() },
            Error::NotSuspended { snapshot },
            Error::NotATemplate { snapshot },
            Error::NoVmm { vmm: driver.clone() },
            Error::NoSnapshots { driver },
        ];
        for error in errors.map(|error| error.to_string()) {
            // And nothing that the command that fails has no flag for.
            assert!(error.contains("`imp ") && !error.contains("--name"), "{error}");
        }
    }
}
