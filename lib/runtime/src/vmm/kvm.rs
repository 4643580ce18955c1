//! Whether this user may use KVM and whether it offers what Firecracker needs. That a guest really runs is found out by
//! running one.

use std::io;

use imp_sys::kvm::{API_VERSION, FIRECRACKER, Kvm};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    #[error("there is no /dev/kvm")]
    Missing,
    #[error("/dev/kvm cannot be opened by this user")]
    NotAllowed(#[source] io::Error),
    #[error("/dev/kvm cannot be asked")]
    Ask(#[source] io::Error),
    #[error("/dev/kvm speaks version {found}, not {API_VERSION}")]
    Version { found: i32 },
    #[error("KVM lacks {}", names.join(", "))]
    Capabilities { names: Vec<&'static str> },
}

pub(crate) fn usable() -> Result<(), Unusable> {
    let kvm = Kvm::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Unusable::Missing,
        _ => Unusable::NotAllowed(error),
    })?;
    let found = kvm.api_version().map_err(Unusable::Ask)?;
    if found != API_VERSION {
        return Err(Unusable::Version { found });
    }
    let missing = kvm.missing(&FIRECRACKER).map_err(Unusable::Ask)?;
    if missing.is_empty() {
        return Ok(());
    }
    Err(Unusable::Capabilities { names: missing.iter().map(|capability| capability.name).collect() })
}
