//! An ELF kernel without what no loader reads: sections, symbols and relocations.

use anyhow::{Context as _, ensure};
use object::LittleEndian;
use object::elf::{FileHeader64, PT_LOAD, PT_NOTE};
use object::read::elf::{FileHeader as _, ProgramHeader as _};

/// Offsets of the section table's description in an ELF64 header.
const SECTION_TABLE: std::ops::Range<usize> = 0x28..0x30;
const SECTION_COUNTS: std::ops::Range<usize> = 0x3c..0x40;

/// `elf` up to the end of its last segment, and saying that it has no sections.
pub(super) fn loadable(elf: &[u8]) -> anyhow::Result<Vec<u8>> {
    let header = FileHeader64::<LittleEndian>::parse(elf).context("it is not a 64-bit ELF file")?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, elf)?;
    let kinds = |kind| segments.iter().any(|segment| segment.p_type(endian) == kind);
    ensure!(kinds(PT_LOAD), "it has nothing to load");
    ensure!(kinds(PT_NOTE), "it has no PVH note (CONFIG_PVH), through which VMMs enter it");
    let ends = segments.iter().filter_map(|segment| {
        let (offset, size) = segment.file_range(endian);
        offset.checked_add(size)
    });
    let end = usize::try_from(ends.max().unwrap_or(0))?;
    let mut kept = elf.get(..end).context("it ends before its last segment")?.to_vec();
    for field in [SECTION_TABLE, SECTION_COUNTS] {
        kept.get_mut(field).context("its segments end within its header")?.fill(0);
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header, one segment of each of `kinds` of which the last ends at 0x200, and sections after them.
    fn elf(kinds: &[u32]) -> Vec<u8> {
        let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
        elf.resize(0x300, 0xaa);
        elf[7..0x40].fill(0);
        elf[0x10] = 2;
        elf[0x12] = 62;
        elf[0x14] = 1;
        elf[0x20] = 0x40;
        elf[0x28..0x30].copy_from_slice(&0x200_u64.to_le_bytes());
        elf[0x34] = 64;
        elf[0x36] = 56;
        elf[0x38] = kinds.len() as u8;
        elf[0x3a] = 64;
        elf[0x3c] = 4;
        for (number, kind) in kinds.iter().enumerate() {
            let at = 0x40 + 56 * number;
            elf[at..at + 56].fill(0);
            elf[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            elf[at + 8..at + 16].copy_from_slice(&0x100_u64.to_le_bytes());
            elf[at + 32..at + 40].copy_from_slice(&0x100_u64.to_le_bytes());
        }
        elf
    }

    #[test]
    fn only_the_segments_are_kept() {
        let kept = loadable(&elf(&[PT_LOAD, PT_NOTE])).unwrap();
        assert_eq!(kept.len(), 0x200);
        let header = FileHeader64::<LittleEndian>::parse(kept.as_slice()).unwrap();
        assert_eq!(header.e_shnum.get(LittleEndian), 0);
        assert_eq!(header.e_shoff.get(LittleEndian), 0);
    }

    #[test]
    fn a_kernel_that_no_vmm_could_enter_is_refused() {
        assert!(loadable(&elf(&[PT_LOAD])).is_err());
        assert!(loadable(&elf(&[PT_NOTE])).is_err());
        assert!(loadable(&elf(&[PT_LOAD, PT_NOTE])[..0x180]).is_err());
    }
}
