//! Whiteouts: what of lower layers a layer hides (OCI image specification, layer.md, "Whiteouts").

use super::super::Refusal;
use super::super::path::{Wish, components, wish};
use super::{Hidden, Links, Merge, Missing, NODE_BYTES, unsaid};
use crate::ext4::NodeId;

impl Merge<'_> {
    /// Handles a whiteout: hides what lower layers have at, or in the directory of, `path`, now or at the end of the layer.
    /// Nothing if `path` is none.
    pub(in super::super) fn whiteout(&mut self, path: &[u8]) -> Result<Option<Hidden>, Refusal> {
        let (above, wish) = asked(path)?;
        match wish {
            Wish::Place => return Ok(None),
            Wish::Nothing => return Ok(Some(Hidden::new())),
            Wish::Hide(_) | Wish::HideAll => {}
        }
        let mut hidden = Hidden::new();
        match self.resolve(&above, Missing::Leave, Links::Own, &mut hidden)?.directory() {
            Some(directory) => self.grant(directory, &wish, &mut hidden),
            None => {
                self.count_bytes(NODE_BYTES + path.len())?;
                self.waiting_whiteouts.push(path.to_vec());
            }
        }
        Ok(Some(hidden))
    }

    /// Whiteouts that waited, now that all links are known which the layer hides or replaces. On refusal, the path.
    pub(super) fn end_whiteouts(&mut self, hidden: &mut Hidden) -> Result<(), (Vec<u8>, Refusal)> {
        let mut waiting = std::mem::take(&mut self.waiting_whiteouts);
        // One may hide the link that leads to another, which then means nothing.
        waiting.sort_by_key(|path| components(path).map_or(0, |components| components.len()));
        for path in waiting {
            self.late_whiteout(&path, hidden).map_err(|reason| (path, reason))?;
        }
        Ok(())
    }

    fn late_whiteout(&mut self, path: &[u8], hidden: &mut Hidden) -> Result<(), Refusal> {
        let (above, wish) = asked(path)?;
        if let Some(directory) = self.resolve(&above, Missing::Leave, Links::All, hidden)?.directory() {
            self.grant(directory, &wish, hidden);
        }
        Ok(())
    }

    fn grant(&mut self, directory: NodeId, wish: &Wish<'_>, hidden: &mut Hidden) {
        match wish {
            Wish::Hide(name) => self.hide(directory, name, hidden),
            Wish::HideAll => self.hide_all(directory, hidden),
            Wish::Place | Wish::Nothing => {}
        }
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
}

/// The directories above a path's last component, and what that asks for.
fn asked(path: &[u8]) -> Result<(Vec<&[u8]>, Wish<'_>), Refusal> {
    let mut above = components(path)?;
    let Some(name) = above.pop() else { return Ok((above, Wish::Place)) };
    // Directories of bookkeeping hold nothing else.
    let wish =
        if above.iter().any(|name| wish(name) == Ok(Wish::Nothing)) { Wish::Nothing } else { wish(name)? };
    Ok((above, wish))
}
