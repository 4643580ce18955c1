//! The processor as a guest on this host sees it.

use std::fs;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Cpu;

use crate::status::{Accelerator, DriverFacts};

/// Stands where the host does not say.
const UNKNOWN: &str = "unknown";

/// For machines that this driver runs here.
pub(crate) fn seen_by_guests(driver: &DriverFacts) -> Cpu {
    match driver.accelerator {
        Accelerator::Kvm => of_host(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
        // It has no features but those that this version of the VMM emulates.
        Accelerator::Emulation => Cpu {
            vendor: driver.name.clone(),
            model: "emulated".to_owned(),
            features: Digest::of(driver.version.as_bytes()),
        },
    }
}

/// From the format of /proc/cpuinfo: the first processor's.
fn of_host(cpuinfo: &str) -> Cpu {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.split('\t').next() == Some(name))?;
        Some(line.split_once(':')?.1.trim()).filter(|value| !value.is_empty())
    };
    let text = |name| field(name).unwrap_or(UNKNOWN).to_owned();
    // Family, model and stepping tell processors apart that have the same name.
    let model =
        format!("{} ({}/{}/{})", text("model name"), text("cpu family"), text("model"), text("stepping"));
    let mut features: Vec<&str> = field("flags").unwrap_or_default().split_whitespace().collect();
    features.sort_unstable();
    Cpu { vendor: text("vendor_id"), model, features: Digest::of(features.join(" ").as_bytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPUINFO: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\n\
        model name\t: Xeon\nstepping\t: 7\nflags\t\t: fpu vme de\n\nprocessor\t: 1\nmodel name\t: Other\n";

    #[test]
    fn the_order_of_features_does_not_matter_and_each_of_them_does() {
        let cpu = of_host(CPUINFO);
        assert_eq!((cpu.vendor.as_str(), cpu.model.as_str()), ("GenuineIntel", "Xeon (6/85/7)"));
        assert_eq!(of_host(&CPUINFO.replace("fpu vme de", "vme de fpu")), cpu);
        assert_ne!(of_host(&CPUINFO.replace("fpu vme de", "fpu vme")), cpu);
        assert_ne!(of_host(&CPUINFO.replace(": 7", ": 8")), cpu);
        assert_eq!(of_host("").vendor, UNKNOWN);
    }
}
