//! What measurements of VMs of one template say. No I/O.

use std::collections::BTreeMap;

use imp_runtime::metering::{Memory, Sharing, bills};
use serde::Serialize;

/// A VM as it was measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Measured {
    pub(super) name: String,
    pub(super) memory: Memory,
    /// Its own memory control group, and what that was charged.
    pub(super) group: Option<(String, u64)>,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Verdict {
    #[serde(rename = "HUSK-COW-SURVIVES")]
    Survives,
    /// The VMs do not share what they should.
    #[serde(rename = "HUSK-DESIGN-FAILED")]
    DesignFailed,
    /// It could not be measured here.
    #[serde(rename = "HUSK-SETUP-LIMITATION")]
    SetupLimitation,
}

impl Verdict {
    /// As other tools look for it.
    pub(super) fn tag(self) -> &'static str {
        match self {
            Self::Survives => "HUSK-COW-SURVIVES",
            Self::DesignFailed => "HUSK-DESIGN-FAILED",
            Self::SetupLimitation => "HUSK-SETUP-LIMITATION",
        }
    }

    pub(super) fn exit_status(self) -> u8 {
        match self {
            Self::Survives => 0,
            Self::DesignFailed => 1,
            Self::SetupLimitation => 2,
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) verdict: Verdict,
    pub(super) why: String,
    /// Absent: nothing was measured.
    #[serde(flatten)]
    pub(super) sharing: Option<Sharing>,
    pub(super) vms: Vec<Line>,
}

/// One VM in the report, in bytes.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) resident: u64,
    pub(super) private_dirty: u64,
    /// Pages of the template's own file.
    pub(super) common: u64,
    /// Its own pages, and its part of the common ones.
    pub(super) bill: u64,
    /// Its own memory control group, if it has one.
    pub(super) cgroup: Option<String>,
    /// What that was charged, which depends on who touched a page first.
    pub(super) cgroup_charged: Option<u64>,
}

impl Report {
    /// Of what could not be measured.
    pub(super) fn limited(why: String) -> Self {
        Self { verdict: Verdict::SetupLimitation, why, sharing: None, vms: Vec::new() }
    }

    pub(super) fn of(vms: &[Measured]) -> Self {
        let memories: Vec<Memory> = vms.iter().map(|vm| vm.memory).collect();
        let sharing = Sharing::of(&memories);
        let (verdict, why) = judge(vms, &sharing);
        let tenants: Vec<(&str, Memory)> = vms.iter().map(|vm| (vm.name.as_str(), vm.memory)).collect();
        let bills: BTreeMap<&str, u64> = bills(&tenants);
        let lines = vms.iter().map(|vm| Line {
            name: vm.name.clone(),
            resident: vm.memory.resident,
            private_dirty: vm.memory.private_dirty,
            common: vm.memory.template.map_or(0, |(_, pages)| pages),
            bill: bills.get(vm.name.as_str()).copied().unwrap_or(0),
            cgroup: vm.group.as_ref().map(|(path, _)| path.clone()),
            cgroup_charged: vm.group.as_ref().map(|(_, charged)| *charged),
        });
        Self { verdict, why: why.to_owned(), sharing: Some(sharing), vms: lines.collect() }
    }
}

fn judge(vms: &[Measured], sharing: &Sharing) -> (Verdict, &'static str) {
    let mut files =
        vms.iter().map(|vm| vm.memory.template.filter(|(_, pages)| *pages > 0).map(|(file, _)| file));
    let first = files.next().flatten();
    if vms.iter().any(|vm| vm.memory.resident == 0) {
        return (Verdict::SetupLimitation, "the pages of a VMM could not be read, or it ended meanwhile");
    }
    if !sharing.dirty_per_vm {
        return (Verdict::SetupLimitation, "a VM has written nothing, so it has not run and proves nothing");
    }
    // Pages of the VMM's program are shared in any case: they prove nothing.
    if first.is_none() || files.any(|file| file != first) {
        return (Verdict::DesignFailed, "not every VM has the template's own pages mapped");
    }
    if sharing.cow_survives {
        (Verdict::Survives, "the VMs share the template's pages, and each has only what it wrote")
    } else {
        (Verdict::DesignFailed, "together the VMs take as much as if they shared nothing")
    }
}

#[cfg(test)]
mod tests {
    use imp_runtime::metering::Template;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn vm(name: &str, inode: u64, common: u64, dirty: u64) -> Measured {
        let template = Some((Template { device: (8, 1), inode }, common * MIB));
        let memory = Memory { resident: (common + dirty) * MIB, private_dirty: dirty * MIB, template };
        Measured { name: name.into(), memory, group: None }
    }

    #[test]
    fn four_that_share_survive_and_pay_equal_parts() {
        let vms: Vec<_> = ["a", "b", "c", "d"].map(|name| vm(name, 7, 60, 4)).into();
        let report = Report::of(&vms);
        assert_eq!(report.verdict, Verdict::Survives, "{}", report.why);
        assert!(report.vms.iter().all(|line| line.bill == 19 * MIB));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((&json["verdict"], &json["CoWSurvives"]), (&"HUSK-COW-SURVIVES".into(), &true.into()));
    }

    #[test]
    fn vms_that_have_only_the_program_of_their_vmm_in_common_fail() {
        let mut vms: Vec<_> = ["a", "b", "c", "d"].map(|name| vm(name, 7, 60, 4)).into();
        vms[3].memory.template = None;
        assert_eq!(Report::of(&vms).verdict, Verdict::DesignFailed);
        vms[3] = vm("d", 8, 60, 4);
        assert_eq!(Report::of(&vms).verdict, Verdict::DesignFailed);
        vms[3] = vm("d", 7, 0, 64);
        assert_eq!(Report::of(&vms).verdict, Verdict::DesignFailed);
    }

    #[test]
    fn what_could_not_be_measured_is_told_from_what_failed() {
        let vms = [vm("a", 7, 60, 4), vm("b", 7, 60, 0)];
        assert_eq!(Report::of(&vms).verdict, Verdict::SetupLimitation);
        let vms = [vm("a", 7, 60, 4), vm("b", 7, 0, 0)];
        assert_eq!(Report::of(&vms).verdict, Verdict::SetupLimitation);
        let report = Report::limited("no template".into());
        assert_eq!((report.verdict.exit_status(), report.sharing), (2, None));
    }
}
