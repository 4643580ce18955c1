//! The tree of files that becomes a file system: nodes in an arena, names in directories.

use std::collections::BTreeMap;

use super::extents::Extent;
use super::xattrs::Xattr;

/// Names a node of the [`Tree`] that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    pub(super) fn position(self) -> usize {
        self.0 as usize
    }
}

/// Seconds since 1970 and nanoseconds below one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timestamp {
    pub seconds: i64,
    pub nanoseconds: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions, set-id bits and sticky bit: 12 bits.
    pub permissions: u16,
    pub uid: u32,
    pub gid: u32,
    pub modified: Timestamp,
    pub xattrs: Vec<Xattr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Character,
    Block,
}

#[derive(Debug)]
pub enum Content {
    Directory(Directory),
    File { size: u64, extents: Box<[Extent]> },
    Symlink(Box<[u8]>),
    Device { kind: DeviceKind, major: u32, minor: u32 },
    Fifo,
    Socket,
}

#[derive(Debug)]
pub struct Directory {
    pub parent: NodeId,
    pub entries: BTreeMap<Box<[u8]>, Entry>,
}

/// A name in a directory, with two points of the build's own time (a count of tar entries).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub node: NodeId,
    /// When the name was put here.
    pub placed: u64,
    /// When it or anything below it was last put here.
    pub touched: u64,
}

#[derive(Debug)]
pub struct Node {
    pub attributes: Attributes,
    pub content: Content,
    /// How many names it has; the root has one from its own existence.
    pub names: u32,
}

pub struct Tree {
    /// Removed nodes leave a gap that the next one fills.
    nodes: Vec<Option<Node>>,
    gaps: Vec<NodeId>,
    living: u64,
}

impl Tree {
    /// A root directory alone.
    pub fn new(root: Attributes) -> Self {
        let content = Content::Directory(Directory { parent: Self::ROOT, entries: BTreeMap::new() });
        let root = Node { attributes: root, content, names: 1 };
        Self { nodes: vec![Some(root)], gaps: Vec::new(), living: 1 }
    }

    pub const ROOT: NodeId = NodeId(0);

    /// A node without a name yet.
    pub fn add(&mut self, attributes: Attributes, content: Content) -> NodeId {
        self.living += 1;
        let node = Some(Node { attributes, content, names: 0 });
        if let Some(id) = self.gaps.pop() {
            *self.slot(id) = node;
            return id;
        }
        let id = NodeId(u32::try_from(self.nodes.len()).expect("entries are bounded far below 2^32"));
        self.nodes.push(node);
        id
    }

    /// A directory without a name yet, to be placed in `parent`.
    pub fn add_directory(&mut self, attributes: Attributes, parent: NodeId) -> NodeId {
        self.add(attributes, Content::Directory(Directory { parent, entries: BTreeMap::new() }))
    }

    /// Gives `node` a name that is free.
    pub fn place(&mut self, parent: NodeId, name: &[u8], node: NodeId, now: u64) {
        self.node_mut(node).names += 1;
        let entry = Entry { node, placed: now, touched: now };
        let before = self.directory_mut(parent).and_then(|d| d.entries.insert(name.into(), entry));
        debug_assert!(before.is_none(), "only a free name is given");
    }

    /// Takes a name away. A node without a name is handed back, its directory entries still in it.
    pub fn unlink(&mut self, parent: NodeId, name: &[u8]) -> Option<Node> {
        let entry = self.directory_mut(parent)?.entries.remove(name)?;
        self.release(entry.node)
    }

    /// Takes away one name of `id`, which no directory holds any more.
    pub fn release(&mut self, id: NodeId) -> Option<Node> {
        let node = self.node_mut(id);
        node.names -= 1;
        if node.names > 0 {
            return None;
        }
        self.gaps.push(id);
        self.living -= 1;
        self.slot(id).take()
    }

    pub fn node(&self, id: NodeId) -> &Node {
        self.nodes.get(id.position()).and_then(Option::as_ref).expect("a node lives while it has a name")
    }

    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.slot(id).as_mut().expect("a node lives while it has a name")
    }

    pub fn directory(&self, id: NodeId) -> Option<&Directory> {
        match &self.node(id).content {
            Content::Directory(directory) => Some(directory),
            Content::File { .. }
            | Content::Symlink(_)
            | Content::Device { .. }
            | Content::Fifo
            | Content::Socket => None,
        }
    }

    pub fn directory_mut(&mut self, id: NodeId) -> Option<&mut Directory> {
        match &mut self.node_mut(id).content {
            Content::Directory(directory) => Some(directory),
            Content::File { .. }
            | Content::Symlink(_)
            | Content::Device { .. }
            | Content::Fifo
            | Content::Socket => None,
        }
    }

    /// How many nodes have a name.
    pub fn living(&self) -> u64 {
        self.living
    }

    /// One more than the largest position of a node.
    pub(super) fn positions(&self) -> usize {
        self.nodes.len()
    }

    fn slot(&mut self, id: NodeId) -> &mut Option<Node> {
        self.nodes.get_mut(id.position()).expect("an id comes from this tree")
    }
}
