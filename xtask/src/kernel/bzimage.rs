//! The ELF kernel inside a bzImage, found by the header of the Linux/x86 boot protocol
//! (the kernel's Documentation/arch/x86/boot.rst, version 2.08 and later).

use std::io::Read as _;

use anyhow::{Context as _, bail, ensure};

const SETUP_SECTORS: usize = 0x1f1;
const MAGIC: usize = 0x202;
const VERSION: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR: usize = 512;

/// A kernel larger than this is no kernel.
const LARGEST: u64 = 512 << 20;

/// How the streams begin that the kernel's build makes with LZ4, the tool's legacy format: blocks, each after its length.
const LZ4_LEGACY: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// What a block of such a stream unpacks to, but for the last, which may be shorter.
const LZ4_BLOCK: usize = 8 << 20;

/// The uncompressed payload of `image`.
pub(super) fn payload(image: &[u8]) -> anyhow::Result<Vec<u8>> {
    decompress(compressed(image)?)
}

fn compressed(image: &[u8]) -> anyhow::Result<&[u8]> {
    ensure!(image.get(MAGIC..MAGIC + 4) == Some(b"HdrS"), "it is not a bzImage");
    let version = number(image, VERSION, 2)?;
    ensure!(version >= 0x208, "its boot protocol {version:#x} does not say where the kernel is");
    // Zero stands for four, from the days of floppy disks.
    let sectors = match number(image, SETUP_SECTORS, 1)? {
        0 => 4,
        sectors => sectors,
    };
    let start = (sectors + 1) * SECTOR + number(image, PAYLOAD_OFFSET, 4)?;
    let end = start + number(image, PAYLOAD_LENGTH, 4)?;
    image.get(start..end).context("it ends before its payload does")
}

fn number(image: &[u8], at: usize, size: usize) -> anyhow::Result<usize> {
    let bytes = image.get(at..at + size).context("it ends within its header")?;
    Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}

fn decompress(payload: &[u8]) -> anyhow::Result<Vec<u8>> {
    // The streams are followed by four bytes with the unpacked size, which none of the readers may reach.
    let mut elf = Vec::new();
    match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            zstd::Decoder::with_buffer(payload)?.single_frame().take(LARGEST).read_to_end(&mut elf)?
        }
        [0x1f, 0x8b, ..] => flate2::bufread::GzDecoder::new(payload).take(LARGEST).read_to_end(&mut elf)?,
        [0xfd, b'7', b'z', b'X', b'Z', ..] => {
            liblzma::bufread::XzDecoder::new(payload).take(LARGEST).read_to_end(&mut elf)?
        }
        [a, b, c, d, blocks @ ..] if [*a, *b, *c, *d] == LZ4_LEGACY => {
            elf = lz4_blocks(blocks)?;
            elf.len()
        }
        [0x7f, b'E', b'L', b'F', ..] => {
            elf.extend_from_slice(payload);
            elf.len()
        }
        _ => bail!(
            "its compression is none of zstd, gzip, xz, lz4; repack it, or give an uncompressed vmlinux"
        ),
    };
    Ok(elf)
}

/// Up to the first block that is not full, or the size that follows them.
fn lz4_blocks(mut rest: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut all = Vec::new();
    let mut unpacked = vec![0; LZ4_BLOCK];
    while let Some((length, behind)) = rest.split_first_chunk().filter(|(_, behind)| !behind.is_empty()) {
        let length = usize::try_from(u32::from_le_bytes(*length))?;
        let (block, behind) = behind.split_at_checked(length).context("it ends within a block")?;
        let count = lz4_flex::block::decompress_into(block, &mut unpacked).context("an LZ4 block")?;
        all.extend_from_slice(unpacked.get(..count).unwrap_or_default());
        ensure!(all.len() as u64 <= LARGEST, "it is larger than a kernel");
        if count < LZ4_BLOCK {
            break;
        }
        rest = behind;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * SECTOR + 100];
        image[SETUP_SECTORS] = 1;
        image[MAGIC..MAGIC + 4].copy_from_slice(b"HdrS");
        image[VERSION..VERSION + 2].copy_from_slice(&0x20f_u16.to_le_bytes());
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&100_u32.to_le_bytes());
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image.extend_from_slice(b"after the payload");
        image
    }

    #[test]
    fn a_kernel_is_found_whatever_it_is_compressed_with() {
        let kernel = b"\x7fELF and the rest".repeat(1000);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&kernel).unwrap();
        let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 1);
        xz.write_all(&kernel).unwrap();
        let size = (kernel.len() as u32).to_le_bytes();
        let zstd = zstd::encode_all(kernel.as_slice(), 1).unwrap();
        for mut payload in [zstd, gzip.finish().unwrap(), xz.finish().unwrap(), lz4(&kernel)] {
            payload.extend_from_slice(&size);
            assert!(super::payload(&image(&payload)).unwrap() == kernel, "magic {:02x?}", &payload[..4]);
        }
        assert!(super::payload(&image(&kernel)).unwrap() == kernel);
    }

    fn lz4(content: &[u8]) -> Vec<u8> {
        let blocks = content.chunks(LZ4_BLOCK).map(lz4_flex::block::compress);
        let blocks = blocks.map(|block| [&(block.len() as u32).to_le_bytes()[..], &block].concat());
        LZ4_LEGACY.into_iter().chain(blocks.flatten()).collect()
    }

    #[test]
    fn a_kernel_of_several_lz4_blocks_is_whole_or_refused() {
        for size in [2 * LZ4_BLOCK, 2 * LZ4_BLOCK + 1] {
            let mut kernel = b"\x7fELF and the rest".repeat(LZ4_BLOCK / 8);
            kernel.truncate(size);
            let packed = lz4(&kernel);
            assert!(
                payload(&image(&[&packed[..], &(size as u32).to_le_bytes()].concat())).unwrap() == kernel
            );
            assert!(payload(&image(&packed[..packed.len() - 1])).is_err());
        }
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        assert!(payload(b"MZ").is_err());
        assert!(payload(&image(b"BZh9")).is_err());
        let whole = image(b"\x7fELF");
        assert!(payload(&whole[..whole.len() - 18]).is_err());
    }
}
