//! Lays the entries of layers over each other, lowest first, into one tree.
//!
//! Each name carries two stamps, when it was placed and when anything at or below it was: a whiteout hides exactly what
//! has no stamp of the current layer, so its place among the layer's entries does not matter. Nothing here recurses:
//! depth is chosen by the image.

use std::collections::VecDeque;

use super::path::{Wish, components, wish};
use super::{Limits, Refusal};
use crate::ext4::{Attributes, Content, MOST_LINKS, NodeId, Tree};

/// Symbolic links that one path may lead through: what the kernel allows.
const MOST_SYMLINKS: usize = 40;
/// Rounds in which hard links that stand before their targets find them.
const LINK_ROUNDS: usize = 40;
/// What a node and its name cost beside what is counted exactly.
const NODE_BYTES: u64 = 256;

/// What lost its last name and had blocks.
pub(super) type Hidden = Vec<Content>;

pub(super) struct Merge<'a> {
    pub(super) tree: Tree,
    limits: &'a Limits,
    /// Counts entries of all layers.
    now: u64,
    /// The stamp of the current layer's first entry.
    layer: u64,
    metadata: u64,
    waiting: Vec<WaitingLink>,
    /// The directory of the last entry, while nothing can have changed what its path means.
    last_parent: Option<(Vec<u8>, NodeId)>,
}

/// A hard link whose target was not there yet.
struct WaitingLink {
    path: Vec<u8>,
    target: Vec<u8>,
    at: u64,
}

/// Whether a path is made to exist.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Create,
    Leave,
}

impl<'a> Merge<'a> {
    pub(super) fn new(limits: &'a Limits) -> Self {
        Self {
            tree: Tree::new(unsaid()),
            limits,
            now: 0,
            layer: 1,
            metadata: 0,
            waiting: Vec::new(),
            last_parent: None,
        }
    }

    pub(super) fn begin_layer(&mut self) {
        self.layer = self.now + 1;
        self.last_parent = None;
    }

    /// Counts one more entry against the limits.
    pub(super) fn count(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.now += 1;
        if self.now > self.limits.entries {
            return Err(Refusal::Entries(self.limits.entries));
        }
        self.count_bytes(bytes)
    }

    /// Counts memory that an entry keeps.
    pub(super) fn count_bytes(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.metadata += bytes as u64;
        self.check_metadata()
    }

    pub(super) fn entries(&self) -> u64 {
        self.now
    }

    /// Places a directory: over another it changes only the attributes.
    pub(super) fn directory(&mut self, path: &[u8], attributes: Attributes) -> Result<Hidden, Refusal> {
        let components = components(path)?;
        let Some((name, above)) = components.split_last() else {
            self.tree.node_mut(Tree::ROOT).attributes = attributes;
            return Ok(Hidden::new());
        };
        let mut hidden = Hidden::new();
        let parent = self.parent(above, &mut hidden)?;
        if let Some(existing) = self.child(parent, name)
            && self.tree.directory(existing).is_some()
        {
            self.tree.node_mut(existing).attributes = attributes;
            self.stamp(parent, name);
            return Ok(hidden);
        }
        self.remove(parent, name, &mut hidden);
        let node = self.tree.add_directory(attributes, parent);
        self.tree.place(parent, name, node, self.now);
        Ok(hidden)
    }

    /// Takes what stands at `path` away, for something that is not a directory, and says where to place it.
    pub(super) fn clear<'p>(&mut self, path: &'p [u8]) -> Result<(NodeId, &'p [u8], Hidden), Refusal> {
        let components = components(path)?;
        let (name, above) = components.split_last().ok_or(Refusal::Root)?;
        let mut hidden = Hidden::new();
        let parent = self.parent(above, &mut hidden)?;
        self.remove(parent, name, &mut hidden);
        Ok((parent, name, hidden))
    }

    /// Places anything but a directory where [`Merge::clear`] said.
    pub(super) fn place(&mut self, parent: NodeId, name: &[u8], attributes: Attributes, content: Content) {
        let node = self.tree.add(attributes, content);
        self.tree.place(parent, name, node, self.now);
    }

    /// Gives the file `target` the further name `path`, now or when the target has come.
    pub(super) fn hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<Hidden, Refusal> {
        match self.target(target)? {
            Some(node) => self.link(path, node),
            None => {
                self.metadata += (path.len() + target.len()) as u64 + NODE_BYTES;
                self.check_metadata()?;
                components(path)?.last().ok_or(Refusal::Root)?;
                let (path, target) = (path.to_vec(), target.to_vec());
                self.waiting.push(WaitingLink { path, target, at: self.now });
                Ok(Hidden::new())
            }
        }
    }

    /// Handles a whiteout: hides what lower layers have at, or in the directory of, `path`.
    pub(super) fn whiteout(&mut self, path: &[u8]) -> Result<Option<Hidden>, Refusal> {
        let components = components(path)?;
        let Some((name, above)) = components.split_last() else { return Ok(None) };
        // Directories of bookkeeping hold nothing else.
        let wish = if above.iter().any(|name| wish(name) == Ok(Wish::Nothing)) {
            Wish::Nothing
        } else {
            wish(name)?
        };
        if wish == Wish::Place {
            return Ok(None);
        }
        let mut hidden = Hidden::new();
        if let Some(parent) = self.resolve(above, Missing::Leave, &mut hidden)? {
            match wish {
                Wish::Hide(name) => self.hide(parent, name, &mut hidden),
                Wish::HideAll => self.hide_all(parent, &mut hidden),
                Wish::Place | Wish::Nothing => {}
            }
        }
        Ok(Some(hidden))
    }

    /// The layer is complete: links that waited find their targets now or never. On refusal, the link's path.
    pub(super) fn end_layer(&mut self) -> Result<Hidden, (Vec<u8>, Refusal)> {
        let mut hidden = Hidden::new();
        for _ in 0..LINK_ROUNDS {
            let before = self.waiting.len();
            for link in std::mem::take(&mut self.waiting) {
                let outcome = self.retry(link, &mut hidden);
                outcome.map_err(|(link, reason)| (link.path, reason))?;
            }
            if self.waiting.is_empty() || self.waiting.len() == before {
                break;
            }
        }
        match self.waiting.pop() {
            None => Ok(hidden),
            Some(link) => {
                let reason = Refusal::NoTarget(String::from_utf8_lossy(&link.target).into_owned());
                Err((link.path, reason))
            }
        }
    }

    fn retry(&mut self, link: WaitingLink, hidden: &mut Hidden) -> Result<(), (WaitingLink, Refusal)> {
        let outcome = self.target(&link.target).and_then(|target| match target {
            None => Ok(false),
            // Something placed later in the layer has taken the name.
            Some(_) if self.is_placed_after(&link)? => Ok(true),
            Some(node) => {
                hidden.extend(self.link(&link.path, node)?);
                Ok(true)
            }
        });
        match outcome {
            Ok(true) => Ok(()),
            Ok(false) => {
                self.waiting.push(link);
                Ok(())
            }
            Err(reason) => Err((link, reason)),
        }
    }

    fn is_placed_after(&mut self, link: &WaitingLink) -> Result<bool, Refusal> {
        let components = components(&link.path)?;
        let (name, above) = components.split_last().ok_or(Refusal::Root)?;
        let parent = self.resolve(above, Missing::Leave, &mut Hidden::new())?;
        let entry = parent.and_then(|parent| self.tree.directory(parent)?.entries.get(*name));
        Ok(entry.is_some_and(|entry| entry.placed > link.at))
    }

    /// The file that a hard link means, or nothing if it does not exist (yet).
    fn target(&mut self, target: &[u8]) -> Result<Option<NodeId>, Refusal> {
        let shown = || String::from_utf8_lossy(target).into_owned();
        let components = components(target)?;
        let (name, above) = components.split_last().ok_or_else(|| Refusal::LinkToDirectory(shown()))?;
        let parent = self.resolve(above, Missing::Leave, &mut Hidden::new())?;
        let Some(node) = parent.and_then(|parent| self.child(parent, name)) else { return Ok(None) };
        match self.tree.directory(node) {
            Some(_) => Err(Refusal::LinkToDirectory(shown())),
            None => Ok(Some(node)),
        }
    }

    fn link(&mut self, path: &[u8], node: NodeId) -> Result<Hidden, Refusal> {
        if self.tree.node(node).names >= MOST_LINKS - 1 {
            return Err(Refusal::TooManyNames);
        }
        // What is cleared may be the target itself, or a directory with its only name.
        self.tree.node_mut(node).names += 1;
        let (parent, name, hidden) = self.clear(path)?;
        self.tree.place(parent, name, node, self.now);
        self.tree.node_mut(node).names -= 1;
        Ok(hidden)
    }

    /// The directory of an entry, made where it is missing.
    fn parent(&mut self, above: &[&[u8]], hidden: &mut Hidden) -> Result<NodeId, Refusal> {
        let key = above.join(&b'/');
        if let Some((path, id)) = &self.last_parent
            && *path == key
        {
            return Ok(*id);
        }
        let parent = self.resolve(above, Missing::Create, hidden)?.ok_or(Refusal::Name)?;
        self.last_parent = Some((key, parent));
        Ok(parent)
    }

    /// Follows `path` through directories and symbolic links, never above the root.
    fn resolve(
        &mut self,
        path: &[&[u8]],
        missing: Missing,
        hidden: &mut Hidden,
    ) -> Result<Option<NodeId>, Refusal> {
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
                    Missing::Leave => return Ok(None),
                    Missing::Create => current = self.add_unsaid(current, &name)?,
                }
                continue;
            };
            match &self.tree.node(entry.node).content {
                Content::Directory(_) => {
                    if missing == Missing::Create {
                        self.touch(current, &name);
                    }
                    current = entry.node;
                }
                Content::Symlink(target) => {
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
                        return Ok(None);
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
        Ok(Some(current))
    }

    /// Adds a directory that no entry describes.
    fn add_unsaid(&mut self, parent: NodeId, name: &[u8]) -> Result<NodeId, Refusal> {
        if name.len() > crate::ext4::MOST_NAME_BYTES {
            return Err(Refusal::NameTooLong(name.len()));
        }
        self.metadata += NODE_BYTES + name.len() as u64;
        self.check_metadata()?;
        let node = self.tree.add_directory(unsaid(), parent);
        self.tree.place(parent, name, node, self.now);
        Ok(node)
    }

    fn hide(&mut self, parent: NodeId, name: &[u8], hidden: &mut Hidden) {
        let entry = self.tree.directory(parent).and_then(|directory| directory.entries.get(name)).copied();
        let Some(entry) = entry else { return };
        if entry.touched < self.layer {
            self.remove(parent, name, hidden);
        } else if self.tree.directory(entry.node).is_some() {
            if entry.placed < self.layer {
                self.tree.node_mut(entry.node).attributes = unsaid();
            }
            self.hide_all(entry.node, hidden);
        }
    }

    /// Removes what the current layer did not touch, however deep.
    fn hide_all(&mut self, directory: NodeId, hidden: &mut Hidden) {
        let mut directories = vec![directory];
        while let Some(id) = directories.pop() {
            let Some(directory) = self.tree.directory(id) else { continue };
            let (kept, lower): (Vec<_>, Vec<_>) =
                directory.entries.iter().partition(|(_, entry)| entry.touched >= self.layer);
            let lower: Vec<Box<[u8]>> = lower.into_iter().map(|(name, _)| name.clone()).collect();
            let kept: Vec<_> = kept.into_iter().map(|(_, entry)| *entry).collect();
            for name in lower {
                self.remove(id, &name, hidden);
            }
            for entry in kept {
                if self.tree.directory(entry.node).is_none() {
                    continue;
                }
                if entry.placed < self.layer {
                    self.tree.node_mut(entry.node).attributes = unsaid();
                }
                directories.push(entry.node);
            }
        }
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

    fn check_metadata(&self) -> Result<(), Refusal> {
        let limit = self.limits.metadata_bytes;
        if self.metadata > limit { Err(Refusal::Metadata(limit)) } else { Ok(()) }
    }
}

/// Attributes of a directory that no entry describes.
fn unsaid() -> Attributes {
    Attributes { permissions: 0o755, ..Attributes::default() }
}
