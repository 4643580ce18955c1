//! Why a VMM ended, where its own end does not say it: what the kernel and the disk know.

use std::path::PathBuf;

use imp_storage::snapshots::Part;
use imp_storage::store::Store;

use crate::cgroup;
use crate::ledger::{Origin, Record};
use crate::status::VmmEnd;

/// What is looked at once a VMM has ended.
pub(super) struct Evidence {
    cgroups: Vec<PathBuf>,
    /// The file that its guest's memory began as, and the size of that.
    memory: Option<(PathBuf, u64)>,
}

impl Evidence {
    pub(super) fn of(record: &Record, store: &Store) -> Self {
        let memory = match &record.origin {
            Origin::Boot => None,
            Origin::Snapshot { digest } => {
                Some((store.snapshots().place(digest, Part::Memory), record.spec.memory.bytes()))
            }
        };
        Self { cgroups: record.cgroups.clone(), memory }
    }

    /// A kill by the kernel itself looks like any other, and like nothing at all to an owner that took the VMM over. A guest
    /// that has lost memory may take its machine down in any way.
    pub(super) fn explain(&self, end: VmmEnd) -> VmmEnd {
        match end {
            VmmEnd::PoweredOff | VmmEnd::MemoryCutShort | VmmEnd::OutOfMemory { .. } => end,
            VmmEnd::Reset | VmmEnd::Exit(_) | VmmEnd::Fault { .. } | VmmEnd::Signal(_) | VmmEnd::Unknown
                if self.is_cut_short() =>
            {
                VmmEnd::MemoryCutShort
            }
            VmmEnd::Signal(_) | VmmEnd::Unknown => cgroup::killed_at_memory_limit(&self.cgroups)
                .map_or(end, |limit_bytes| VmmEnd::OutOfMemory { limit_bytes }),
            VmmEnd::Reset | VmmEnd::Exit(_) | VmmEnd::Fault { .. } => end,
        }
    }

    /// Of a file that is gone nothing can be said.
    fn is_cut_short(&self) -> bool {
        self.memory
            .as_ref()
            .is_some_and(|(path, size)| std::fs::metadata(path).is_ok_and(|metadata| metadata.len() < *size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Fault;

    #[test]
    fn a_machine_whose_memory_file_was_cut_short_ended_for_that_however_it_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        let evidence = Evidence { cgroups: Vec::new(), memory: Some((path.clone(), 8192)) };
        let gone = VmmEnd::Fault { status: 149, fault: Fault::MemoryGone };
        let ends = [gone, VmmEnd::Exit(0), VmmEnd::Reset, VmmEnd::Signal(7), VmmEnd::Unknown];
        for (bytes, cut) in [(None, false), (Some(8192), false), (Some(4096), true)] {
            if let Some(bytes) = bytes {
                std::fs::write(&path, vec![0; bytes]).unwrap();
            }
            for end in ends {
                let expected = if cut { VmmEnd::MemoryCutShort } else { end };
                assert_eq!(evidence.explain(end), expected, "{bytes:?}");
            }
            assert_eq!(evidence.explain(VmmEnd::PoweredOff), VmmEnd::PoweredOff);
        }
        let booted = Evidence { cgroups: Vec::new(), memory: None };
        assert_eq!(booted.explain(VmmEnd::Signal(7)), VmmEnd::Signal(7));
    }
}
