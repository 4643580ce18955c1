//! PAX extended headers: records `LENGTH KEY=VALUE\n` that override the plain header.

use std::collections::BTreeSet;

use super::sparse::PaxSparse;
use crate::ext4::{Timestamp, Xattr};
use crate::image::base::Refusal;

/// What the extended header of one entry says.
#[derive(Default)]
pub(super) struct Extended {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link_target: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) modified: Option<Timestamp>,
    pub(super) xattrs: Vec<Xattr>,
    pub(super) sparse: PaxSparse,
}

pub(super) fn parse(bytes: &[u8]) -> Result<Extended, Refusal> {
    let mut extended = Extended::default();
    let mut seen = BTreeSet::new();
    for record in Records(bytes) {
        let (key, value) = record?;
        if !PaxSparse::may_repeat(key) && !seen.insert(key) {
            return Err(Refusal::Twice(String::from_utf8_lossy(key).into_owned()));
        }
        // An empty value takes the record back: the plain header counts.
        if !value.is_empty() || key.starts_with(SCHILY) || key.starts_with(LIBARCHIVE) {
            apply(&mut extended, key, value)?;
        }
    }
    Ok(extended)
}

/// A global header holds comments and the like; what would rename or resize entries is refused.
pub(super) fn check_global(bytes: &[u8]) -> Result<(), Refusal> {
    for record in Records(bytes) {
        let (key, _) = record?;
        if matches!(key, b"path" | b"linkpath" | b"size" | b"uid" | b"gid") || key.starts_with(b"GNU.sparse.")
        {
            return Err(Refusal::Global(String::from_utf8_lossy(key).into_owned()));
        }
    }
    Ok(())
}

const SCHILY: &[u8] = b"SCHILY.xattr.";
const LIBARCHIVE: &[u8] = b"LIBARCHIVE.xattr.";

fn apply(extended: &mut Extended, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
    match key {
        b"path" => extended.path = Some(text(value)?),
        b"linkpath" => extended.link_target = Some(text(value)?),
        b"size" => extended.size = Some(decimal("size", value)?),
        b"uid" => extended.uid = Some(id("uid", value)?),
        b"gid" => extended.gid = Some(id("gid", value)?),
        b"mtime" => extended.modified = Some(timestamp(value)?),
        _ => {
            if let Some(name) = key.strip_prefix(SCHILY) {
                // The plain form wins over the encoded one, wherever it stands.
                extended.xattrs.retain(|xattr| *xattr.name != *name);
                extended.xattrs.push(Xattr { name: name.into(), value: value.into() });
            } else if let Some(name) = key.strip_prefix(LIBARCHIVE) {
                let name = percent_decoded(name)?;
                if !extended.xattrs.iter().any(|xattr| *xattr.name == *name) {
                    let value = base64_decoded(value)?;
                    extended.xattrs.push(Xattr { name: name.into(), value: value.into() });
                }
            } else {
                extended.sparse.apply(key, value)?;
            }
        }
    }
    Ok(())
}

struct Records<'a>(&'a [u8]);

impl<'a> Iterator for Records<'a> {
    type Item = Result<(&'a [u8], &'a [u8]), Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let record = self.split();
        if record.is_none() {
            self.0 = &[];
        }
        Some(record.ok_or(Refusal::Record))
    }
}

impl<'a> Records<'a> {
    fn split(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let space = self.0.iter().take(20).position(|byte| *byte == b' ')?;
        let length = usize::try_from(decimal("length", self.0.get(..space)?).ok()?).ok()?;
        let (record, rest) = self.0.split_at_checked(length)?;
        let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=').filter(|at| *at > 0)?;
        self.0 = rest;
        Some((record.get(..equals)?, record.get(equals + 1..)?))
    }
}

fn text(value: &[u8]) -> Result<Vec<u8>, Refusal> {
    if value.contains(&0) { Err(Refusal::Record) } else { Ok(value.to_vec()) }
}

pub(super) fn decimal(name: &'static str, value: &[u8]) -> Result<u64, Refusal> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Refusal::Number(name));
    }
    str::from_utf8(value).ok().and_then(|digits| digits.parse().ok()).ok_or(Refusal::Number(name))
}

fn id(name: &'static str, value: &[u8]) -> Result<u32, Refusal> {
    u32::try_from(decimal(name, value)?).map_err(|_| Refusal::Number(name))
}

/// Seconds with a fraction of any length, which may be negative.
fn timestamp(value: &[u8]) -> Result<Timestamp, Refusal> {
    let wrong = || Refusal::Number("mtime");
    let text = str::from_utf8(value).map_err(|_| wrong())?;
    let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let whole = decimal("mtime", whole.as_bytes())?;
    let seconds = i64::try_from(whole).map_err(|_| wrong())?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let digits = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanoseconds = digits.fold(0, |value, digit| value * 10 + u32::from(digit - b'0'));
    Ok(match (negative, nanoseconds) {
        (false, _) => Timestamp { seconds, nanoseconds },
        (true, 0) => Timestamp { seconds: -seconds, nanoseconds: 0 },
        (true, _) => Timestamp { seconds: -seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
    })
}

fn percent_decoded(name: &[u8]) -> Result<Vec<u8>, Refusal> {
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte != b'%' {
            decoded.push(*byte);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2).ok_or(Refusal::Record)?;
        decoded.push(*hex::decode(digits).map_err(|_| Refusal::Record)?.first().ok_or(Refusal::Record)?);
        rest = after;
    }
    Ok(decoded)
}

fn base64_decoded(value: &[u8]) -> Result<Vec<u8>, Refusal> {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
    let padded = value.ends_with(b"=");
    let decoded = if padded { STANDARD.decode(value) } else { STANDARD_NO_PAD.decode(value) };
    decoded.map_err(|_| Refusal::Record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_measured_by_their_own_length() {
        let extended = parse(b"12 path=a\nb\n15 mtime=-1.25\n9 size=5\n").unwrap();
        assert_eq!(extended.path.as_deref(), Some(b"a\nb".as_slice()));
        assert_eq!(extended.modified, Some(Timestamp { seconds: -2, nanoseconds: 750_000_000 }));
        assert_eq!(extended.size, Some(5));
        for bad in [b"99 path=a\n".as_slice(), b"path=a\n", b"10 path=ab", b"8 path\n\n", b"6 =ab\n"] {
            assert_eq!(parse(bad).err(), Some(Refusal::Record), "{bad:?}");
        }
    }

    #[test]
    fn a_record_given_twice_is_refused() {
        let twice = parse(b"10 path=a\n10 path=b\n").err();
        assert_eq!(twice, Some(Refusal::Twice("path".into())));
    }

    #[test]
    fn both_spellings_of_one_xattr_are_one() {
        let records = b"35 LIBARCHIVE.xattr.user.a%20b=aGk\n28 SCHILY.xattr.user.a b=hi\n";
        let extended = parse(records).unwrap();
        assert_eq!(extended.xattrs, [Xattr { name: (*b"user.a b").into(), value: (*b"hi").into() }]);
    }
}
