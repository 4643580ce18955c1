//! Reads a file system back: slowly, completely, and by the format's description alone.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) struct Image {
    file: File,
    inodes_per_group: u32,
    /// Every path, without leading slash; the root is "".
    pub(crate) paths: BTreeMap<String, Node>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) inode: u32,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) links: u16,
    pub(crate) size: u64,
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
    pub(crate) flags: u32,
    pub(crate) xattrs: BTreeMap<String, Vec<u8>>,
    block: [u8; 60],
}

/// The high bits of a mode.
pub(crate) const DIRECTORY: u16 = 0o040_000;
pub(crate) const FILE: u16 = 0o100_000;
pub(crate) const SYMLINK: u16 = 0o120_000;

impl Node {
    pub(crate) fn kind(&self) -> u16 {
        self.mode & 0o170_000
    }

    pub(crate) fn device(&self) -> (u32, u32) {
        let (old, new) = (le32(&self.block, 0), le32(&self.block, 4));
        if old != 0 {
            return (old >> 8, old & 0xff);
        }
        ((new & 0xf_ff00) >> 8, (new & 0xff) | ((new >> 12) & 0xf_ff00))
    }
}

fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

impl Image {
    pub(crate) fn open(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let mut superblock = [0; 1024];
        file.read_exact_at(&mut superblock, 1024).unwrap();
        assert_eq!(le16(&superblock, 0x38), 0xef53);
        let mut image = Self { file, inodes_per_group: le32(&superblock, 0x28), paths: BTreeMap::new() };
        let mut waiting = vec![(String::new(), 2)];
        while let Some((path, inode)) = waiting.pop() {
            let node = image.inode(inode);
            if node.kind() == DIRECTORY {
                for (name, inode) in image.names(&node) {
                    waiting.push((if path.is_empty() { name } else { format!("{path}/{name}") }, inode));
                }
            }
            assert!(image.paths.insert(path, node).is_none(), "a name twice in one directory");
        }
        image
    }

    pub(crate) fn node(&self, path: &str) -> &Node {
        self.paths.get(path).unwrap_or_else(|| panic!("no {path:?} in {:?}", self.names_of_all()))
    }

    pub(crate) fn names_of_all(&self) -> Vec<&str> {
        self.paths.keys().map(String::as_str).filter(|path| !path.is_empty()).take(100).collect()
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        self.paths.contains_key(path)
    }

    pub(crate) fn read(&self, path: &str) -> Vec<u8> {
        self.content(self.node(path))
    }

    pub(crate) fn text(&self, path: &str) -> String {
        String::from_utf8(self.read(path)).unwrap()
    }

    pub(crate) fn target(&self, path: &str) -> String {
        let node = self.node(path);
        assert_eq!(node.kind(), SYMLINK);
        String::from_utf8(self.content(node)).unwrap()
    }

    /// Bytes that are not holes, from (logical block, blocks) of each extent.
    pub(crate) fn allocated(&self, path: &str) -> u64 {
        self.extents(&self.node(path).block).iter().map(|(_, blocks, _)| u64::from(*blocks) * 4096).sum()
    }

    fn content(&self, node: &Node) -> Vec<u8> {
        let size = usize::try_from(node.size).unwrap();
        if node.flags & 0x8_0000 == 0 {
            return node.block[..size].to_vec();
        }
        let mut content = vec![0; size];
        for (logical, blocks, physical) in self.extents(&node.block) {
            for block in 0..blocks {
                let at = (logical + block) as usize * 4096;
                let bytes = self.block(physical + u64::from(block));
                let end = (at + 4096).min(size);
                content[at..end].copy_from_slice(&bytes[..end - at]);
            }
        }
        content
    }

    fn block(&self, number: u64) -> [u8; 4096] {
        let mut block = [0; 4096];
        self.file.read_exact_at(&mut block, number * 4096).unwrap();
        block
    }

    fn extents(&self, root: &[u8]) -> Vec<(u32, u32, u64)> {
        assert_eq!(le16(root, 0), 0xf30a);
        let (entries, depth) = (le16(root, 2), le16(root, 6));
        let records = (0..entries as usize).map(|n| &root[12 + n * 12..24 + n * 12]);
        if depth == 0 {
            let extent = |r: &[u8]| (le32(r, 0), u32::from(le16(r, 4)), u64::from(le32(r, 8)));
            return records.map(extent).collect();
        }
        records.flat_map(|record| self.extents(&self.block(le32(record, 4).into()))).collect()
    }

    fn inode(&self, number: u32) -> Node {
        let (group, index) = ((number - 1) / self.inodes_per_group, (number - 1) % self.inodes_per_group);
        let mut descriptor = [0; 32];
        self.file.read_exact_at(&mut descriptor, 4096 + u64::from(group) * 32).unwrap();
        let table = u64::from(le32(&descriptor, 8)) * 4096;
        let mut raw = [0; 256];
        self.file.read_exact_at(&mut raw, table + u64::from(index) * 256).unwrap();
        let extra = le32(&raw, 0x88);
        let mut xattrs = BTreeMap::new();
        if le32(&raw, 160) == 0xea02_0000 {
            read_xattrs(&raw, 164, 164, &mut xattrs);
        }
        if le32(&raw, 0x68) != 0 {
            read_xattrs(&self.block(le32(&raw, 0x68).into()), 32, 0, &mut xattrs);
        }
        Node {
            inode: number,
            mode: le16(&raw, 0),
            uid: u32::from(le16(&raw, 2)) | (u32::from(le16(&raw, 0x78)) << 16),
            gid: u32::from(le16(&raw, 0x18)) | (u32::from(le16(&raw, 0x7a)) << 16),
            links: le16(&raw, 0x1a),
            size: u64::from(le32(&raw, 4)) | (u64::from(le32(&raw, 0x6c)) << 32),
            seconds: i64::from(le32(&raw, 0x10).cast_signed()) + (i64::from(extra & 3) << 32),
            nanoseconds: extra >> 2,
            flags: le32(&raw, 0x20),
            xattrs,
            block: raw[0x28..0x64].try_into().unwrap(),
        }
    }

    /// Index blocks look like unused names.
    fn names(&self, directory: &Node) -> Vec<(String, u32)> {
        let mut names = Vec::new();
        for block in self.content(directory).chunks(4096) {
            let mut at = 0;
            while at < 4096 {
                let (inode, length) = (le32(block, at), usize::from(le16(block, at + 4)));
                let name = &block[at + 8..at + 8 + usize::from(block[at + 6])];
                if inode != 0 && name != b"." && name != b".." {
                    names.push((String::from_utf8(name.to_vec()).unwrap(), inode));
                }
                at += length;
            }
        }
        names
    }
}

fn read_xattrs(record: &[u8], start: usize, origin: usize, xattrs: &mut BTreeMap<String, Vec<u8>>) {
    let mut at = start;
    while le32(record, at) != 0 {
        let prefix = match record[at + 1] {
            1 => "user.",
            2 => "system.posix_acl_access",
            3 => "system.posix_acl_default",
            4 => "trusted.",
            6 => "security.",
            other => panic!("prefix {other}"),
        };
        let name = &record[at + 16..at + 16 + usize::from(record[at])];
        let value = origin + usize::from(le16(record, at + 2));
        let size = le32(record, at + 8) as usize;
        let value = if size == 0 { Vec::new() } else { record[value..value + size].to_vec() };
        xattrs.insert(format!("{prefix}{}", String::from_utf8_lossy(name)), value);
        at += 16 + name.len().next_multiple_of(4);
    }
}
