//! What cannot be placed before its layer is complete: hard links that stand before their targets, and whatever leads
//! through a lower layer's symbolic link.

use super::super::Refusal;
use super::super::path::components;
use super::{Change, Hidden, Links, Merge, Missing, NODE_BYTES, Way};
use crate::ext4::Content;

/// Rounds in which hard links that stand before their targets find them.
const ROUNDS: usize = 40;

pub(super) struct Waiting {
    path: Vec<u8>,
    change: Change,
    /// The stamp of its entry.
    at: u64,
}

impl Merge<'_> {
    pub(super) fn wait(&mut self, path: &[u8], change: Change) -> Result<(), Refusal> {
        let target = match &change {
            Change::HardLink(target) => target.len(),
            Change::Directory(_) | Change::Place(..) => 0,
        };
        self.count_bytes(NODE_BYTES + path.len() + target)?;
        self.waiting.push(Waiting { path: path.to_vec(), change, at: self.now });
        Ok(())
    }

    /// The layer is complete: what waited is placed now or never. On refusal, the path.
    pub(in super::super) fn end_layer(&mut self) -> Result<Hidden, (Vec<u8>, Refusal)> {
        let mut hidden = Hidden::new();
        self.end_whiteouts(&mut hidden)?;
        for _ in 0..ROUNDS {
            let before = self.waiting.len();
            for waiting in std::mem::take(&mut self.waiting) {
                self.retry(waiting, &mut hidden)?;
            }
            if self.waiting.is_empty() || self.waiting.len() == before {
                break;
            }
        }
        match self.waiting.pop() {
            None => Ok(hidden),
            Some(Waiting { path, change, at: _ }) => Err((path, never(&change))),
        }
    }

    fn retry(&mut self, waiting: Waiting, hidden: &mut Hidden) -> Result<(), (Vec<u8>, Refusal)> {
        let Waiting { path, change, at } = waiting;
        self.now = at;
        let outcome = match self.is_taken(&path, at) {
            Ok(true) => {
                hidden.extend(change.into_content());
                Ok(None)
            }
            Ok(false) => self.change(&path, change, Links::Before(at), hidden),
            Err(reason) => Err(reason),
        };
        match outcome {
            Ok(None) => Ok(()),
            Ok(Some(change)) => {
                self.waiting.push(Waiting { path, change, at });
                Ok(())
            }
            Err(reason) => Err((path, reason)),
        }
    }

    /// Whether something that stands later in the layer has taken the name, or one above it.
    fn is_taken(&mut self, path: &[u8], at: u64) -> Result<bool, Refusal> {
        let components = components(path)?;
        let (name, above) = components.split_last().ok_or(Refusal::Root)?;
        match self.resolve(above, Missing::Leave, Links::Before(at), &mut Hidden::new())? {
            Way::Taken => Ok(true),
            Way::Missing => Ok(false),
            Way::To(parent) => {
                let entry = self.tree.directory(parent).and_then(|parent| parent.entries.get(*name));
                Ok(entry.is_some_and(|entry| entry.placed > at))
            }
        }
    }
}

impl Change {
    fn into_content(self) -> Option<Content> {
        match self {
            Self::Place(_, content) => Some(content),
            Self::Directory(_) | Self::HardLink(_) => None,
        }
    }
}

/// Why what still waits has no place.
fn never(change: &Change) -> Refusal {
    match change {
        Change::HardLink(target) => Refusal::NoTarget(String::from_utf8_lossy(target).into_owned()),
        Change::Directory(_) | Change::Place(..) => Refusal::Name,
    }
}
