//! Lays the entries of layers over each other, lowest first, into one tree.
//!
//! Each name carries two stamps, when it was placed and when anything at or below it was: a whiteout hides exactly what
//! has no stamp of the current layer, so its place among the layer's entries does not matter. For the same reason
//! whatever leads through a lower layer's symbolic link waits for the end of the layer, which may yet hide or replace
//! the link. Nothing here recurses: depth is chosen by the image.

mod waiting;
mod whiteouts;

use std::collections::VecDeque;

use self::waiting::Waiting;
use super::path::components;
use super::{Limits, Refusal};
use crate::ext4::{Attributes, Content, MOST_LINKS, NodeId, Tree};

/// Symbolic links that one path may lead through: what the kernel allows.
const MOST_SYMLINKS: usize = 40;
/// What a node and its name cost beside what is counted exactly.
const NODE_BYTES: usize = 256;

/// What lost its last name and had blocks.
pub(super) type Hidden = Vec<Content>;

pub(super) struct Merge<'a> {
    pub(super) tree: Tree,
    limits: &'a Limits,
    /// Entries of all layers so far.
    entries: u64,
    /// The stamp of the entry at hand: which one of all layers it is.
    now: u64,
    /// The stamp of the current layer's first entry.
    layer: u64,
    metadata: u64,
    waiting: Vec<Waiting>,
    /// Paths of whiteouts that wait.
    waiting_whiteouts: Vec<Vec<u8>>,
    /// The directory of the last entry, while nothing can have changed what its path means.
    last_parent: Option<(Vec<u8>, NodeId)>,
}

/// What an entry asks for at its path.
pub(super) enum Change {
    /// A directory: over another it changes only the attributes.
    Directory(Attributes),
    /// Anything else that has content of its own.
    Place(Attributes, Content),
    /// A further name for this file, now or when it has come.
    HardLink(Vec<u8>),
}

/// Whether a path is made to exist.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Create,
    Leave,
}

/// Which symbolic links lead on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Links {
    /// Those of the current layer: nothing in it hides them.
    Own,
    /// All, because the layer is complete.
    All,
    /// All for an entry with this stamp, whose way ends where a later entry has put something else.
    Before(u64),
}

/// Where a path leads.
enum Way {
    To(NodeId),
    /// Nowhere, at least for now.
    Missing,
    /// To nothing any more: a later entry has taken one of its names.
    Taken,
}

impl Way {
    fn directory(self) -> Option<NodeId> {
        match self {
            Self::To(directory) => Some(directory),
            Self::Missing | Self::Taken => None,
        }
    }
}

impl<'a> Merge<'a> {
    pub(super) fn new(limits: &'a Limits) -> Self {
        Self {
            tree: Tree::new(unsaid()),
            limits,
            entries: 0,
            now: 0,
            layer: 1,
            metadata: 0,
            waiting: Vec::new(),
            waiting_whiteouts: Vec::new(),
            last_parent: None,
        }
    }

    pub(super) fn begin_layer(&mut self) {
        self.layer = self.entries + 1;
        self.last_parent = None;
    }

    /// Counts one more entry against the limits.
    pub(super) fn count(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.entries += 1;
        self.now = self.entries;
        if self.entries > self.limits.entries {
            return Err(Refusal::Entries(self.limits.entries));
        }
        self.count_bytes(bytes)
    }

    /// Counts memory that an entry keeps.
    pub(super) fn count_bytes(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.metadata += bytes as u64;
        let limit = self.limits.metadata_bytes;
        if self.metadata > limit { Err(Refusal::Metadata(limit)) } else { Ok(()) }
    }

    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// Takes away what stands at `path`, ahead of the content that will replace it, so that its blocks can serve.
    pub(super) fn clear(&mut self, path: &[u8]) -> Result<Hidden, Refusal> {
        let components = components(path)?;
        let (name, above) = components.split_last().ok_or(Refusal::Root)?;
        let mut hidden = Hidden::new();
        if let Some(parent) = self.parent(above, Links::Own, &mut hidden)? {
            self.remove(parent, name, &mut hidden);
        }
        Ok(hidden)
    }

    /// Makes a change, now or at the end of the layer.
    pub(super) fn put(&mut self, path: &[u8], change: Change) -> Result<Hidden, Refusal> {
        let mut hidden = Hidden::new();
        if let Some(change) = self.change(path, change, Links::Own, &mut hidden)? {
            self.wait(path, change)?;
        }
        Ok(hidden)
    }

    /// Makes a change; gives it back if nothing is where its path or its target leads.
    fn change(
        &mut self,
        path: &[u8],
        change: Change,
        links: Links,
        hidden: &mut Hidden,
    ) -> Result<Option<Change>, Refusal> {
        let components = components(path)?;
        let Some((name, above)) = components.split_last() else {
            let Change::Directory(attributes) = change else { return Err(Refusal::Root) };
            self.tree.node_mut(Tree::ROOT).attributes = attributes;
            return Ok(None);
        };
        match change {
            Change::Directory(attributes) => {
                let Some(parent) = self.parent(above, links, hidden)? else {
                    return Ok(Some(Change::Directory(attributes)));
                };
                self.directory(parent, name, attributes, hidden);
            }
            Change::Place(attributes, content) => {
                let Some(parent) = self.parent(above, links, hidden)? else {
                    return Ok(Some(Change::Place(attributes, content)));
                };
                self.remove(parent, name, hidden);
                let node = self.tree.add(attributes, content);
                self.tree.place(parent, name, node, self.now);
            }
            Change::HardLink(target) => {
                let links_of_target = match links {
                    Links::Own => Links::Own,
                    Links::All | Links::Before(_) => Links::All,
                };
                let Some(node) = self.target(&target, links_of_target)? else {
                    return Ok(Some(Change::HardLink(target)));
                };
                if self.tree.node(node).names >= MOST_LINKS - 1 {
                    return Err(Refusal::TooManyNames);
                }
                // What is taken away may be the target itself, or a directory with its only name.
                self.tree.node_mut(node).names += 1;
                let parent = self.parent(above, links, hidden)?;
                if let Some(parent) = parent {
                    self.remove(parent, name, hidden);
                    self.tree.place(parent, name, node, self.now);
                }
                hidden.extend(self.tree.release(node).map(|node| node.content));
                if parent.is_none() {
                    return Ok(Some(Change::HardLink(target)));
                }
            }
        }
        Ok(None)
    }

    fn directory(&mut self, parent: NodeId, name: &[u8], attributes: Attributes, hidden: &mut Hidden) {
        if let Some(existing) = self.child(parent, name)
            && self.tree.directory(existing).is_some()
        {
            self.tree.node_mut(existing).attributes = attributes;
            self.stamp(parent, name);
            return;
        }
        self.remove(parent, name, hidden);
        let node = self.tree.add_directory(attributes, parent);
        self.tree.place(parent, name, node, self.now);
    }

    /// The file that a hard link means, or nothing if it does not exist (yet).
    fn target(&mut self, target: &[u8], links: Links) -> Result<Option<NodeId>, Refusal> {
        let shown = || String::from_utf8_lossy(target).into_owned();
        let components = components(target)?;
        let (name, above) = components.split_last().ok_or_else(|| Refusal::LinkToDirectory(shown()))?;
        let parent = self.resolve(above, Missing::Leave, links, &mut Hidden::new())?.directory();
        let Some(node) = parent.and_then(|parent| self.child(parent, name)) else { return Ok(None) };
        match self.tree.directory(node) {
            Some(_) => Err(Refusal::LinkToDirectory(shown())),
            None => Ok(Some(node)),
        }
    }

    /// The directory of an entry, made where it is missing.
    fn parent(
        &mut self,
        above: &[&[u8]],
        links: Links,
        hidden: &mut Hidden,
    ) -> Result<Option<NodeId>, Refusal> {
        let key = above.join(&b'/');
        if let Some((path, id)) = &self.last_parent
            && *path == key
        {
            return Ok(Some(*id));
        }
        let parent = self.resolve(above, Missing::Create, links, hidden)?.directory();
        if let Some(parent) = parent {
            self.last_parent = Some((key, parent));
        }
        Ok(parent)
    }

    /// Follows `path` through directories and symbolic links, never above the root.
    fn resolve(
        &mut self,
        path: &[&[u8]],
        missing: Missing,
        links: Links,
        hidden: &mut Hidden,
    ) -> Result<Way, Refusal> {
        let mut ahead: VecDeque<Box<[u8]>> = path.iter().map(|name| (*name).into()).collect();
        let mut symlinks = 0;
        let mut current = Tree::ROOT;
        while let Some(name) = ahead.pop_front() {
            match &*name {
                b"" | b"." => continue,
                b".." => {
                    current = self.tree.directory(current).map_or(Tree::ROOT, |directory| directory.parent);
                    continue;
                }
                _ => {}
            }
            let entry =
                self.tree.directory(current).and_then(|directory| directory.entries.get(&name)).copied();
            let Some(entry) = entry else {
                match missing {
                    Missing::Leave => return Ok(Way::Missing),
                    Missing::Create => current = self.add_unsaid(current, &name)?,
                }
                continue;
            };
            let is_later = matches!(links, Links::Before(at) if entry.placed > at);
            match &self.tree.node(entry.node).content {
                Content::Directory(_) => {
                    if missing == Missing::Create {
                        self.touch(current, &name);
                    }
                    current = entry.node;
                }
                _ if is_later => return Ok(Way::Taken),
                Content::Symlink(target) => {
                    if links == Links::Own && entry.placed < self.layer {
                        return Ok(Way::Missing);
                    }
                    symlinks += 1;
                    if symlinks > MOST_SYMLINKS {
                        return Err(Refusal::SymlinkLoop);
                    }
                    if target.starts_with(b"/") {
                        current = Tree::ROOT;
                    }
                    for part in target.split(|byte| *byte == b'/').rev() {
                        ahead.push_front(part.into());
                    }
                }
                Content::File { .. } | Content::Device { .. } | Content::Fifo | Content::Socket => {
                    if missing == Missing::Leave {
                        return Ok(Way::Missing);
                    }
                    if entry.placed >= self.layer {
                        return Err(Refusal::NotADirectory(String::from_utf8_lossy(&name).into_owned()));
                    }
                    // A lower layer's file under a name that this layer uses as a directory.
                    self.remove(current, &name, hidden);
                    current = self.add_unsaid(current, &name)?;
                }
            }
        }
        Ok(Way::To(current))
    }

    /// Adds a directory that no entry describes.
    fn add_unsaid(&mut self, parent: NodeId, name: &[u8]) -> Result<NodeId, Refusal> {
        if name.len() > crate::ext4::MOST_NAME_BYTES {
            return Err(Refusal::NameTooLong(name.len()));
        }
        self.count_bytes(NODE_BYTES + name.len())?;
        let node = self.tree.add_directory(unsaid(), parent);
        // An entry of this layer that describes it may still wait, and is not taken for older.
        self.tree.place(parent, name, node, self.layer);
        Ok(node)
    }

    /// Takes a name away with everything below it.
    fn remove(&mut self, parent: NodeId, name: &[u8], hidden: &mut Hidden) {
        let Some(node) = self.child(parent, name) else { return };
        if matches!(self.tree.node(node).content, Content::Directory(_) | Content::Symlink(_)) {
            self.last_parent = None;
        }
        let mut gone = Vec::from_iter(self.tree.unlink(parent, name));
        while let Some(node) = gone.pop() {
            match node.content {
                Content::Directory(directory) => {
                    gone.extend(directory.entries.values().filter_map(|entry| self.tree.release(entry.node)));
                }
                Content::File { .. } => hidden.push(node.content),
                Content::Symlink(_) | Content::Device { .. } | Content::Fifo | Content::Socket => {}
            }
        }
    }

    fn child(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        Some(self.tree.directory(parent)?.entries.get(name)?.node)
    }

    fn touch(&mut self, parent: NodeId, name: &[u8]) {
        let now = self.now;
        if let Some(entry) = self.tree.directory_mut(parent).and_then(|d| d.entries.get_mut(name)) {
            entry.touched = now;
        }
    }

    fn stamp(&mut self, parent: NodeId, name: &[u8]) {
        let now = self.now;
        if let Some(entry) = self.tree.directory_mut(parent).and_then(|d| d.entries.get_mut(name)) {
            (entry.placed, entry.touched) = (now, now);
        }
    }
}

/// Attributes of a directory that no entry describes.
fn unsaid() -> Attributes {
    Attributes { permissions: 0o755, ..Attributes::default() }
}
