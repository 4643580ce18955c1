//! Sparse files: where the stored bytes belong, in the four ways that GNU tar has written it.

use super::pax::decimal;
use crate::image::base::Refusal;

/// Stored bytes and their place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::image::base) struct Segment {
    pub(in crate::image::base) offset: u64,
    pub(in crate::image::base) length: u64,
}

/// The map of one sparse file, checked: in order, without overlap, inside the file, and all of what is stored.
pub(super) fn checked(pairs: &[(u64, u64)], size: u64, stored: u64) -> Result<Vec<Segment>, Refusal> {
    let (mut end, mut total) = (0, 0_u64);
    let mut segments = Vec::with_capacity(pairs.len());
    for (offset, length) in pairs.iter().copied() {
        let after = offset.checked_add(length).ok_or(Refusal::SparseMap)?;
        if offset < end || after > size {
            return Err(Refusal::SparseMap);
        }
        end = after;
        total += length;
        if length > 0 {
            segments.push(Segment { offset, length });
        }
    }
    if total == stored { Ok(segments) } else { Err(Refusal::SparseMap) }
}

/// The `GNU.sparse.*` records of formats 0.0, 0.1 and 1.0.
#[derive(Default)]
pub(super) struct PaxSparse {
    major: Option<u64>,
    minor: Option<u64>,
    name: Option<Vec<u8>>,
    size: Option<u64>,
    pairs: Vec<(u64, u64)>,
    /// An offset of format 0.0 whose length has not come yet.
    offset: Option<u64>,
}

impl PaxSparse {
    pub(super) fn may_repeat(key: &[u8]) -> bool {
        matches!(key, b"GNU.sparse.offset" | b"GNU.sparse.numbytes")
    }

    pub(super) fn apply(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        match key {
            b"GNU.sparse.major" => self.major = Some(decimal("sparse", value)?),
            b"GNU.sparse.minor" => self.minor = Some(decimal("sparse", value)?),
            b"GNU.sparse.name" => self.name = Some(value.to_vec()),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.size = Some(decimal("sparse", value)?),
            b"GNU.sparse.map" => self.pairs = map(value)?,
            b"GNU.sparse.offset" => {
                let before = self.offset.replace(decimal("sparse", value)?);
                before.map_or(Ok(()), |_| Err(Refusal::SparseMap))?;
            }
            b"GNU.sparse.numbytes" => {
                let offset = self.offset.take().ok_or(Refusal::SparseMap)?;
                self.pairs.push((offset, decimal("sparse", value)?));
            }
            _ => {}
        }
        Ok(())
    }

    /// The name of the file itself; `path` then is a made-up one for readers that do not know the format.
    pub(super) fn take_name(&mut self) -> Option<Vec<u8>> {
        self.name.take()
    }

    /// Nothing for a file that is not sparse.
    pub(super) fn form(self) -> Result<Option<PaxForm>, Refusal> {
        let Some(size) = self.size else {
            let none = self.major.is_none() && self.pairs.is_empty() && self.offset.is_none();
            return if none { Ok(None) } else { Err(Refusal::SparseMap) };
        };
        match (self.major, self.minor) {
            (None | Some(0), _) => Ok(Some(PaxForm::InHeader { size, pairs: self.pairs })),
            (Some(1), Some(0)) => Ok(Some(PaxForm::InData { size })),
            _ => Err(Refusal::SparseMap),
        }
    }
}

pub(super) enum PaxForm {
    InHeader {
        size: u64,
        pairs: Vec<(u64, u64)>,
    },
    /// The map is text in front of the data.
    InData {
        size: u64,
    },
}

fn map(value: &[u8]) -> Result<Vec<(u64, u64)>, Refusal> {
    let mut numbers = value.split(|byte| *byte == b',').map(|number| decimal("sparse", number));
    let mut pairs = Vec::new();
    while let Some(offset) = numbers.next() {
        pairs.push((offset?, numbers.next().ok_or(Refusal::SparseMap)??));
    }
    Ok(pairs)
}
