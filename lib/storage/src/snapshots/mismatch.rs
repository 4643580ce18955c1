//! Whether a snapshot can be restored on a host. Pure: what the host has is an argument.

use super::manifest::{Cpu, Description, Part, Vmm};
use crate::blob::digest::Digest;

/// What a host would restore a snapshot with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    pub vmm: Vmm,
    pub cpu: Cpu,
    /// The guest kernel that machines get here; None: whichever the snapshot has.
    pub kernel: Option<Digest>,
}

/// Why a snapshot is not restored here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error("it was made by {} {}, here is {} {}", .made.name, .made.version, .here.name, .here.version)]
    Vmm { made: Box<Vmm>, here: Box<Vmm> },
    #[error(
        "it was made on {} {} with the features {}, here is {} {} with {}",
        .made.vendor, .made.model, .made.features.short(), .here.vendor, .here.model, .here.features.short()
    )]
    Cpu { made: Box<Cpu>, here: Box<Cpu> },
    #[error("its guest runs kernel {}, here guests get {}", .made.short(), .here.short())]
    Kernel { made: Digest, here: Digest },
    #[error("its guest runs kernel {}, which is not installed here", .made.short())]
    NoKernel { made: Digest },
    #[error("its guest runs a kernel that was given as a file, and such kernels do not travel")]
    OwnKernel,
    #[error("it has format {found}, this version of imp knows {}", super::manifest::FORMAT)]
    Format { found: u64 },
    #[error("its manifest is damaged; remove it, and make or pull it again")]
    DamagedManifest,
    #[error("its {part} is damaged (first at byte {at}); remove it, and make or pull it again")]
    Damaged { part: Part, at: u64 },
    #[error("its {part} has {found} bytes instead of {expected}; remove it, and make or pull it again")]
    Size { part: Part, expected: u64, found: u64 },
    #[error("its {part} is missing; remove it, and make or pull it again")]
    Missing { part: Part },
    #[error("its {part} was changed since it was made; remove it, and make it again")]
    Changed { part: Part },
    #[error("it was good only until this machine restarted; make it again")]
    Restarted,
}

/// Whether the machine of this description can go on here.
pub fn check(made: &Description, here: &Host) -> Result<(), Mismatch> {
    if made.vmm != here.vmm {
        return Err(Mismatch::Vmm { made: Box::new(made.vmm.clone()), here: Box::new(here.vmm.clone()) });
    }
    if made.cpu != here.cpu {
        return Err(Mismatch::Cpu { made: Box::new(made.cpu.clone()), here: Box::new(here.cpu.clone()) });
    }
    match here.kernel {
        Some(kernel) if kernel != made.kernel => Err(Mismatch::Kernel { made: made.kernel, here: kernel }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshots::fixture::description;

    #[test]
    fn each_difference_that_a_guest_would_notice_is_its_own_reason() {
        let made = description();
        let host = || Host { vmm: made.vmm.clone(), cpu: made.cpu.clone(), kernel: None };
        assert_eq!(check(&made, &host()), Ok(()));
        assert_eq!(check(&made, &Host { kernel: Some(made.kernel), ..host() }), Ok(()));
        let mut newer = host();
        newer.vmm.version = "1.13.0".into();
        assert!(matches!(check(&made, &newer), Err(Mismatch::Vmm { .. })));
        let mut another = host();
        another.vmm.name = "qemu".into();
        assert!(matches!(check(&made, &another), Err(Mismatch::Vmm { .. })));
        for change in [
            |cpu: &mut Cpu| cpu.vendor.push('x'),
            |cpu: &mut Cpu| cpu.model.push('x'),
            |cpu: &mut Cpu| cpu.features = Digest::of(b"fewer"),
        ] {
            let mut host = host();
            change(&mut host.cpu);
            assert!(matches!(check(&made, &host), Err(Mismatch::Cpu { .. })));
        }
        let kernel = Host { kernel: Some(Digest::of(b"newer")), ..host() };
        assert_eq!(
            check(&made, &kernel),
            Err(Mismatch::Kernel { made: made.kernel, here: Digest::of(b"newer") })
        );
    }
}
