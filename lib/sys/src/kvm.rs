//! What /dev/kvm says of itself: linux/Documentation/virt/kvm/api.rst, chapter 4.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use rustix::ioctl;

/// The only version of the interface there has been since Linux 2.6.22.
pub const API_VERSION: i32 = 12;

// From <linux/kvm.h>.
const GET_API_VERSION: ioctl::Opcode = ioctl::opcode::none(0xae, 0x00);
const CHECK_EXTENSION: ioctl::Opcode = ioctl::opcode::none(0xae, 0x03);

/// What a kernel's KVM may or may not offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    pub name: &'static str,
    number: libc::c_ulong,
}

/// What Firecracker asks for before it makes a machine on x86-64.
pub const FIRECRACKER: [Capability; 14] = [
    Capability { name: "KVM_CAP_IRQCHIP", number: 0 },
    Capability { name: "KVM_CAP_USER_MEMORY", number: 3 },
    Capability { name: "KVM_CAP_SET_TSS_ADDR", number: 4 },
    Capability { name: "KVM_CAP_EXT_CPUID", number: 7 },
    Capability { name: "KVM_CAP_MP_STATE", number: 14 },
    Capability { name: "KVM_CAP_IRQFD", number: 32 },
    Capability { name: "KVM_CAP_PIT2", number: 33 },
    Capability { name: "KVM_CAP_PIT_STATE2", number: 35 },
    Capability { name: "KVM_CAP_IOEVENTFD", number: 36 },
    Capability { name: "KVM_CAP_ADJUST_CLOCK", number: 39 },
    Capability { name: "KVM_CAP_VCPU_EVENTS", number: 41 },
    Capability { name: "KVM_CAP_DEBUGREGS", number: 50 },
    Capability { name: "KVM_CAP_XSAVE", number: 55 },
    Capability { name: "KVM_CAP_XCRS", number: 56 },
];

/// The device, opened as this user.
#[derive(Debug)]
pub struct Kvm(File);

impl Kvm {
    pub fn open() -> io::Result<Self> {
        OpenOptions::new().read(true).write(true).open("/dev/kvm").map(Self)
    }

    pub fn api_version(&self) -> io::Result<i32> {
        self.ask(GET_API_VERSION, 0)
    }

    /// Those of `wanted` that are not there.
    pub fn missing(&self, wanted: &[Capability]) -> io::Result<Vec<Capability>> {
        let mut missing = Vec::new();
        for capability in wanted {
            if self.ask(CHECK_EXTENSION, capability.number)? == 0 {
                missing.push(*capability);
            }
        }
        Ok(missing)
    }

    fn ask(&self, call: ioctl::Opcode, argument: libc::c_ulong) -> io::Result<i32> {
        // SAFETY: both calls take their argument by value and touch no memory of ours.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::Ioctl::from(call), argument) };
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
    }
}
