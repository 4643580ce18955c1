//! Gives every node of a tree its inode number.

use std::collections::VecDeque;

use super::bytes::low32;
use super::tree::{NodeId, Tree};
use super::{FIRST_INODE, ROOT_INODE};

/// Inode numbers: the root has 2, the others count from the first that is not reserved, parents before children.
pub(super) struct Numbered {
    /// Every node once.
    pub(super) order: Vec<NodeId>,
    by_position: Vec<u32>,
}

impl Numbered {
    pub(super) fn of(tree: &Tree) -> Self {
        let mut numbered = Self { order: Vec::new(), by_position: vec![0; tree.positions()] };
        let mut waiting = VecDeque::from([Tree::ROOT]);
        numbered.give(Tree::ROOT, ROOT_INODE);
        let mut next = FIRST_INODE;
        while let Some(id) = waiting.pop_front() {
            let Some(directory) = tree.directory(id) else { continue };
            for entry in directory.entries.values() {
                if numbered.number(entry.node) == 0 {
                    numbered.give(entry.node, next);
                    next += 1;
                    waiting.push_back(entry.node);
                }
            }
        }
        numbered
    }

    fn give(&mut self, id: NodeId, number: u32) {
        *self.by_position.get_mut(id.position()).expect("an id comes from this tree") = number;
        self.order.push(id);
    }

    pub(super) fn number(&self, id: NodeId) -> u32 {
        self.by_position.get(id.position()).copied().unwrap_or(0)
    }

    /// The numbers in the order of `order`.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> + use<> {
        std::iter::once(ROOT_INODE).chain(FIRST_INODE..)
    }

    pub(super) fn highest(&self) -> u32 {
        low32(self.order.len() as u64) - 1 + FIRST_INODE - 1
    }
}
