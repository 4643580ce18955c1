//! Whose memory it is, when machines made of one snapshot share its pages: what is shared is counted once, whoever touched
//! it first, and paid for by all who may use it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The file that holds a snapshot's memory: the same for every machine that is made of it, by whatever path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Template {
    pub device: (u32, u32),
    pub inode: u64,
}

impl Template {
    /// None: the file is not there any more.
    pub(crate) fn of(memory: &Path) -> Option<Self> {
        let file = fs::metadata(memory).ok()?;
        let device = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
        Some(Self { device, inode: file.ino() })
    }
}

/// What one VMM's process has in memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub resident: u64,
    /// Written by this process: nobody else's.
    pub private_dirty: u64,
    /// The snapshot it is made of, and how many of that file's own pages it has mapped.
    pub template: Option<(Template, u64)>,
}

impl Memory {
    /// From the format of /proc/PID/smaps, of a process whose guest's memory is a private mapping of `template`, if it is made
    /// of one. What the text does not say is zero.
    pub(crate) fn parse(smaps: &str, template: Option<Template>) -> Self {
        let mut memory = Self { template: template.map(|template| (template, 0)), ..Self::default() };
        for Field { file, name, bytes } in fields(smaps) {
            match name {
                "Rss" => memory.resident += bytes,
                "Private_Dirty" => memory.private_dirty += bytes,
                _ => {}
            }
            let of_template = file.is_some() && file == template;
            if let Some((_, pages)) = memory.template.as_mut().filter(|_| of_template) {
                match name {
                    "Rss" => *pages += bytes,
                    // A page that was written is a copy.
                    "Private_Dirty" => *pages = pages.saturating_sub(bytes),
                    _ => {}
                }
            }
        }
        memory
    }

    /// Pages that are not copies of its own: the snapshot's, and those of the VMM's program.
    fn shared(self) -> u64 {
        self.resident.saturating_sub(self.private_dirty)
    }
}

/// Bytes of a snapshot's own pages that only this process has now: nobody else happens to have touched them.
pub(crate) fn only_here(smaps: &str, template: Template) -> u64 {
    let own = |field: &Field<'_>| field.file == Some(template) && field.name == "Private_Clean";
    fields(smaps).filter(own).map(|field| field.bytes).sum()
}

/// A line of a mapping.
struct Field<'a> {
    file: Option<Template>,
    name: &'a str,
    bytes: u64,
}

/// From the format of /proc/PID/smaps.
fn fields(smaps: &str) -> impl Iterator<Item = Field<'_>> {
    let mut of = None;
    smaps.lines().filter_map(move |line| {
        if let Some(file) = mapping(line) {
            of = file;
            return None;
        }
        let (name, value) = line.split_once(':')?;
        Some(Field { file: of, name, bytes: kilobytes(value)? })
    })
}

/// The file of a line that begins a mapping: "START-END perms offset major:minor inode path"; `None` within for one of
/// none.
fn mapping(line: &str) -> Option<Option<Template>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    u64::from_str_radix(start, 16).and(u64::from_str_radix(end, 16)).ok()?;
    let (major, minor) = fields.nth(2)?.split_once(':')?;
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = fields.next()?.parse().ok()?;
    Some(Some(Template { device, inode }).filter(|_| inode != 0))
}

fn kilobytes(value: &str) -> Option<u64> {
    value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// What sharing saves, over machines made of one snapshot. Names and rules are those that tools which read such reports
/// know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Sharing {
    /// What the machines seem to take when each is looked at alone.
    pub naive_sum: u64,
    /// Pages of the one that has most of what is shared: each counts once.
    pub shared_resident: u64,
    pub total_private_dirty: u64,
    pub aggregate_physical: u64,
    #[serde(rename = "CoWSavings")]
    pub cow_savings: u64,
    /// Whether the pages are shared indeed: all but one machine have them for nothing.
    #[serde(rename = "CoWSurvives")]
    pub cow_survives: bool,
    /// Whether each machine has pages of its own: one that has none has not run, and proves nothing.
    #[serde(rename = "DirtyPerVM")]
    pub dirty_per_vm: bool,
}

impl Sharing {
    pub fn of(machines: &[Memory]) -> Self {
        let naive_sum = machines.iter().map(|machine| machine.resident).sum();
        let shared_resident = machines.iter().map(|machine| machine.shared()).max().unwrap_or(0);
        let total_private_dirty = machines.iter().map(|machine| machine.private_dirty).sum();
        let aggregate_physical = shared_resident + total_private_dirty;
        Self {
            naive_sum,
            shared_resident,
            total_private_dirty,
            aggregate_physical,
            cow_savings: naive_sum.saturating_sub(aggregate_physical),
            cow_survives: machines.len() >= 2
                && shared_resident > 0
                && aggregate_physical <= naive_sum.saturating_sub(shared_resident),
            dirty_per_vm: machines.iter().all(|machine| machine.private_dirty > 0),
        }
    }
}

/// What each tenant pays: the pages that are its machines' own, and of each snapshot's common pages the part that its
/// machines are of all machines made of it. The sum over all tenants is what there is.
pub fn bills<T: Ord + Clone>(machines: &[(T, Memory)]) -> BTreeMap<T, u64> {
    let mut common: BTreeMap<Template, (u64, u64)> = BTreeMap::new();
    for (template, pages) in machines.iter().filter_map(|(_, machine)| machine.template) {
        let (most, users) = common.entry(template).or_default();
        *most = (*most).max(pages);
        *users += 1;
    }
    let mut bills = BTreeMap::new();
    // Shares are rounded so that they add up: each machine pays up to where the next begins.
    let mut paid: BTreeMap<Template, u64> = BTreeMap::new();
    for (tenant, machine) in machines {
        let (own, share) = match machine.template {
            None => (machine.resident, 0),
            Some((template, pages)) => {
                let (most, users) = common.get(&template).copied().unwrap_or((pages, 1));
                let before = paid.entry(template).or_default();
                let share = part(most, *before + 1, users) - part(most, *before, users);
                *before += 1;
                (machine.resident.saturating_sub(pages), share)
            }
        };
        *bills.entry(tenant.clone()).or_default() += own + share;
    }
    bills
}

fn part(of: u64, number: u64, all: u64) -> u64 {
    let part = u128::from(of) * u128::from(number) / u128::from(all.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const TEMPLATE: Template = Template { device: (0xfe, 0), inode: 42 };
    const OTHER: Template = Template { device: (0xfe, 1), inode: 42 };

    fn made_of(template: Template, common: u64, dirty: u64) -> Memory {
        Memory { resident: common + dirty, private_dirty: dirty, template: Some((template, common)) }
    }

    #[test]
    fn pages_of_a_snapshot_are_told_from_copies_and_from_other_files() {
        let smaps = "\
7f0000000000-7f0010000000 rw-p 00000000 fe:00 42                         /some/where/memory
Size:             262144 kB
Rss:               40960 kB
Pss:               20480 kB
Shared_Clean:      30720 kB
Private_Clean:      2048 kB
Private_Dirty:      8192 kB
VmFlags: rd wr mr mw me dc nr sd
7f0020000000-7f0020100000 r-xp 00000000 fe:01 42                         /usr/bin/vmm
Rss:                1024 kB
Private_Dirty:         0 kB
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
Rss:                  64 kB
Private_Dirty:        64 kB
";
        let memory = Memory::parse(smaps, Some(TEMPLATE));
        assert_eq!(memory.resident, (40_960 + 1024 + 64) << 10);
        assert_eq!(memory.private_dirty, (8192 + 64) << 10);
        assert_eq!(memory.template, Some((TEMPLATE, (40_960 - 8192) << 10)));
        assert_eq!(only_here(smaps, TEMPLATE), 2048 << 10);
        assert_eq!((only_here(smaps, OTHER), only_here("", TEMPLATE)), (0, 0));
        assert_eq!(Memory::parse(smaps, None).template, None);
        assert_eq!(Memory::parse("", Some(TEMPLATE)).template, Some((TEMPLATE, 0)));
    }

    #[test]
    fn the_kernel_s_own_text_is_read() {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let memory = Memory::parse(&smaps, None);
        assert!(memory.resident > memory.private_dirty && memory.private_dirty > 0, "{memory:?}");
    }

    #[test]
    fn sharing_survives_only_where_pages_are_really_shared() {
        let four = [made_of(TEMPLATE, 60 * MIB, 4 * MIB); 4];
        let sharing = Sharing::of(&four);
        assert_eq!((sharing.naive_sum, sharing.shared_resident), (256 * MIB, 60 * MIB));
        assert_eq!((sharing.total_private_dirty, sharing.aggregate_physical), (16 * MIB, 76 * MIB));
        assert_eq!(sharing.cow_savings, 180 * MIB);
        assert!(sharing.cow_survives && sharing.dirty_per_vm);
        let copies = [Memory { resident: 64 * MIB, private_dirty: 64 * MIB, template: None }; 4];
        assert!(!Sharing::of(&copies).cow_survives);
        assert!(!Sharing::of(&four[..1]).cow_survives);
        assert!(!Sharing::of(&[]).cow_survives);
        let asleep = [four[0], made_of(TEMPLATE, 60 * MIB, 0)];
        assert!(!Sharing::of(&asleep).dirty_per_vm);
    }

    #[test]
    fn a_report_has_the_names_that_others_read() {
        let json = serde_json::to_value(Sharing::of(&[])).unwrap();
        for name in [
            "NaiveSum",
            "SharedResident",
            "TotalPrivateDirty",
            "AggregatePhysical",
            "CoWSavings",
            "CoWSurvives",
            "DirtyPerVM",
        ] {
            assert!(json.get(name).is_some(), "{name} in {json}");
        }
    }

    #[test]
    fn a_tenant_pays_for_what_it_writes_and_for_its_part_of_what_all_share() {
        // The first has faulted in everything, the last has written much.
        let machines = [
            ("a", made_of(TEMPLATE, 90 * MIB, MIB)),
            ("b", made_of(TEMPLATE, 10 * MIB, MIB)),
            ("b", made_of(TEMPLATE, 10 * MIB, 65 * MIB)),
            ("c", made_of(OTHER, 8 * MIB, 2 * MIB)),
            ("c", Memory { resident: 5 * MIB, private_dirty: 5 * MIB, template: None }),
        ];
        let bills = bills(&machines);
        assert_eq!(bills["a"], 31 * MIB);
        assert_eq!(bills["b"], (1 + 65 + 60) * MIB);
        assert_eq!(bills["c"], (8 + 2 + 5) * MIB);
    }

    proptest! {
        #[test]
        fn all_bills_together_are_what_there_is(
            machines in prop::collection::vec((0_u8..4, any::<bool>(), 0..1_u64 << 30, 0..1_u64 << 30), 0..12),
        ) {
            let machines: Vec<(u8, Memory)> = machines
                .into_iter()
                .map(|(tenant, other, common, dirty)| (tenant, made_of(if other { OTHER } else { TEMPLATE }, common, dirty)))
                .collect();
            let common = |template| {
                let of = machines.iter().filter_map(|(_, machine)| machine.template);
                of.filter(|(its, _)| *its == template).map(|(_, pages)| pages).max().unwrap_or(0)
            };
            let dirty: u64 = machines.iter().map(|(_, machine)| machine.private_dirty).sum();
            let there_is = dirty + common(TEMPLATE) + common(OTHER);
            prop_assert_eq!(bills(&machines).values().sum::<u64>(), there_is);
        }
    }
}
