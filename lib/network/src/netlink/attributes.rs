//! Netlink attributes, written and read.

const NESTED: u16 = 1 << 15;
/// An attribute's kind without its flags.
const KIND: u16 = 0x3fff;
const HEADER: usize = 4;

/// A run of attributes. Numbers are in network order, as nf_tables wants all of its own.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Attributes(Vec<u8>);

impl Attributes {
    /// Attributes behind a fixed header.
    pub(crate) fn after(header: &[u8]) -> Self {
        Self(header.to_vec())
    }

    pub(crate) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).expect("no attribute of ours is near 64 KiB");
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(crate) fn text(self, kind: u16, value: &str) -> Self {
        let mut zero_terminated = value.as_bytes().to_vec();
        zero_terminated.push(0);
        self.bytes(kind, &zero_terminated)
    }

    pub(crate) fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(crate) fn u64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(crate) fn nest(self, kind: u16, inner: Self) -> Self {
        self.bytes(kind | NESTED, &inner.0)
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// The attributes in `bytes`, up to the first that is malformed.
pub(crate) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let [l0, l1, k0, k1, ..] = *rest else { return None };
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = rest.get(HEADER..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([k0, k1]) & KIND, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_with_its_padding_left_out() {
        let bytes = Attributes::default()
            .text(1, "ab")
            .u32(2, 7)
            .nest(3, Attributes::default().bytes(4, &[9]))
            .into_bytes();
        let read: Vec<_> = attributes(&bytes).collect();
        assert_eq!(read, [(1, &b"ab\0"[..]), (2, &[0, 0, 0, 7]), (3, &[5, 0, 4, 0, 9, 0, 0, 0])]);
    }

    #[test]
    fn a_length_past_the_end_ends_the_reading() {
        assert_eq!(attributes(&[200, 0, 1, 0, 1, 2, 3, 4]).count(), 0);
        assert_eq!(attributes(&[3, 0, 1, 0]).count(), 0);
    }
}
