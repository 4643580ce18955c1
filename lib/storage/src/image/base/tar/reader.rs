//! The members of a tar, one after the other, from a stream that is read once.

use std::io::{self, BufRead};

use super::RECORD;
use super::header::{self, Header, OldSparse};
use super::pax::{self, Extended};
use super::sparse::{self, PaxForm, Segment};
use crate::ext4::{DeviceKind, MOST_MAJOR, MOST_MINOR, Timestamp, Xattr};
use crate::image::base::{Limits, Refusal};

/// The largest size that an octal size field can say.
const MOST_OCTAL_SIZE: u64 = 0o77_777_777_777;

#[derive(Debug, thiserror::Error)]
pub(in crate::image::base) enum Error {
    #[error("the stream cannot be read")]
    Io(#[from] io::Error),
    /// `path` as far as it was known.
    #[error("{path:?} is refused")]
    Refused {
        path: Vec<u8>,
        #[source]
        reason: Refusal,
    },
}

#[derive(Debug)]
pub(in crate::image::base) struct Member {
    pub(in crate::image::base) path: Vec<u8>,
    pub(in crate::image::base) kind: Kind,
    pub(in crate::image::base) permissions: u16,
    pub(in crate::image::base) uid: u32,
    pub(in crate::image::base) gid: u32,
    pub(in crate::image::base) modified: Timestamp,
    pub(in crate::image::base) xattrs: Vec<Xattr>,
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::image::base) enum Kind {
    /// The stored bytes follow, in the order of `segments`.
    File {
        size: u64,
        segments: Vec<Segment>,
    },
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Device {
        kind: DeviceKind,
        major: u32,
        minor: u32,
    },
    Fifo,
}

pub(in crate::image::base) struct Reader<'a, R> {
    source: R,
    limits: &'a Limits,
    /// Stored bytes of the current member that were not consumed.
    stored: u64,
    /// Zeros behind them, up to the next header.
    padding: u64,
}

/// Headers that belong to the next member.
#[derive(Default)]
struct Ahead {
    path: Option<Vec<u8>>,
    link_target: Option<Vec<u8>>,
    extended: Option<Extended>,
}

impl<'a, R: BufRead> Reader<'a, R> {
    pub(in crate::image::base) fn new(source: R, limits: &'a Limits) -> Self {
        Self { source, limits, stored: 0, padding: 0 }
    }

    /// The next member, or nothing at the end.
    pub(in crate::image::base) fn next(&mut self) -> Result<Option<Member>, Error> {
        self.skip(self.stored + self.padding)?;
        (self.stored, self.padding) = (0, 0);
        let mut ahead = Ahead::default();
        loop {
            let Some(header) = self.header()? else {
                let nothing = ahead.path.is_none() && ahead.link_target.is_none() && ahead.extended.is_none();
                return if nothing { Ok(None) } else { Err(refused(&[], Refusal::NoEntry)) };
            };
            match header.type_flag() {
                b'x' => {
                    let extended = self.small(&header).and_then(|bytes| at(&[], pax::parse(&bytes)))?;
                    once(&mut ahead.extended, extended, "PAX")?;
                }
                b'g' => {
                    let bytes = self.small(&header)?;
                    at(&[], pax::check_global(&bytes))?;
                }
                b'L' => {
                    let path = header::until_nul(&self.small(&header)?).to_vec();
                    once(&mut ahead.path, path, "path")?;
                }
                b'K' => {
                    let target = header::until_nul(&self.small(&header)?).to_vec();
                    once(&mut ahead.link_target, target, "linkpath")?;
                }
                _ => return self.member(&header, ahead).map(Some),
            }
        }
    }

    /// The next stored bytes of the current member, or nothing when all were consumed.
    pub(in crate::image::base) fn data(&mut self) -> Result<Option<&[u8]>, Error> {
        if self.stored == 0 {
            return Ok(None);
        }
        let most = usize::try_from(self.stored).unwrap_or(usize::MAX);
        let available = self.source.fill_buf()?;
        if available.is_empty() {
            return Err(refused(&[], Refusal::Truncated));
        }
        Ok(available.get(..available.len().min(most)))
    }

    pub(in crate::image::base) fn source(&self) -> &R {
        &self.source
    }

    pub(in crate::image::base) fn consume(&mut self, bytes: usize) {
        self.source.consume(bytes);
        self.stored -= bytes as u64;
    }

    fn member(&mut self, header: &Header, ahead: Ahead) -> Result<Member, Error> {
        let mut extended = ahead.extended.unwrap_or_default();
        let real_name = extended.sparse.take_name();
        let long = at(&[], agreed(ahead.path, extended.path.take(), "path"))?;
        let path = real_name.or(long).unwrap_or_else(|| header.path());
        if path.len() > self.limits.path_bytes {
            return Err(refused(path.get(..200).unwrap_or(&path), Refusal::Path(self.limits.path_bytes)));
        }
        let link = at(&path, agreed(ahead.link_target, extended.link_target.take(), "linkpath"))?;
        let link = link.unwrap_or_else(|| header.link_target());
        let plain = self.plain(header, &mut extended);
        let (permissions, uid, gid, modified) = at(&path, plain)?;
        let xattrs = std::mem::take(&mut extended.xattrs);
        let kind = match header.type_flag() {
            b'0' | 0 | b'7' | b'S' if !path.ends_with(b"/") => self.file(header, extended, &path)?,
            b'0' | 0 | b'7' if header.size().is_ok_and(|size| size == 0) => Kind::Directory,
            b'5' => Kind::Directory,
            b'1' => Kind::HardLink(link),
            b'2' => Kind::Symlink(link),
            b'3' => at(&path, device(header, DeviceKind::Character))?,
            b'4' => at(&path, device(header, DeviceKind::Block))?,
            b'6' => Kind::Fifo,
            other => return Err(refused(&path, Refusal::Type(other.into()))),
        };
        Ok(Member { path, kind, permissions, uid, gid, modified, xattrs })
    }

    fn plain(&self, header: &Header, extended: &mut Extended) -> Result<(u16, u32, u32, Timestamp), Refusal> {
        let uid = extended.uid.map_or_else(|| header.uid(), Ok)?;
        let gid = extended.gid.map_or_else(|| header.gid(), Ok)?;
        let modified = match extended.modified {
            Some(modified) => modified,
            None => Timestamp { seconds: header.modified()?, nanoseconds: 0 },
        };
        Ok((header.permissions()?, uid, gid, modified))
    }

    fn file(&mut self, header: &Header, extended: Extended, path: &[u8]) -> Result<Kind, Error> {
        let plain = at(path, header.size())?;
        let stored = match extended.size {
            // Only what the plain header cannot say may differ from it.
            Some(size) if size != plain && size <= MOST_OCTAL_SIZE => {
                return Err(refused(path, Refusal::Sizes { extended: size, plain }));
            }
            Some(size) => size,
            None => plain,
        };
        if stored > i64::MAX as u64 {
            return Err(refused(path, Refusal::FileTooLarge(stored)));
        }
        self.stored = stored;
        self.padding = stored.next_multiple_of(RECORD as u64) - stored;
        let form = at(path, extended.sparse.form())?;
        let old = header.type_flag() == b'S';
        let (size, segments) = match form {
            None if old => {
                let (pairs, size) = self.old_sparse(header, path)?;
                (size, at(path, sparse::checked(&pairs, size, stored))?)
            }
            None => (stored, at(path, sparse::checked(&[(0, stored)], stored, stored))?),
            Some(_) if old => return Err(refused(path, Refusal::SparseMap)),
            Some(PaxForm::InHeader { size, pairs }) => {
                (size, at(path, sparse::checked(&pairs, size, stored))?)
            }
            Some(PaxForm::InData { size }) => {
                let pairs = self.map_in_data(path)?;
                (size, at(path, sparse::checked(&pairs, size, self.stored))?)
            }
        };
        Ok(Kind::File { size, segments })
    }

    /// The pairs of the header and of the records that follow it.
    fn old_sparse(&mut self, header: &Header, path: &[u8]) -> Result<(Vec<(u64, u64)>, u64), Error> {
        let OldSparse { mut pairs, mut more, size } = at(path, header.old_sparse())?;
        while more {
            let mut record = [0; RECORD];
            self.exact(&mut record)?;
            self.check_header_bytes(pairs.len() * 24)?;
            pairs.extend(at(path, header::sparse_pairs(record.get(..504).unwrap_or(&[])))?);
            more = record.get(504).is_some_and(|flag| *flag != 0);
        }
        Ok((pairs, size))
    }

    /// Format 1.0: a count and that many pairs in decimal lines, filled up to a whole record.
    fn map_in_data(&mut self, path: &[u8]) -> Result<Vec<(u64, u64)>, Error> {
        let mut read = 0;
        let mut numbers = self.decimal_lines(path, 1, &mut read)?;
        let count = numbers.pop().unwrap_or(0);
        let limit = self.limits.header_bytes;
        let count = usize::try_from(count).ok().filter(|count| *count <= limit / 4);
        let count = count.ok_or_else(|| refused(path, Refusal::HeaderBytes(limit)))?;
        let numbers = self.decimal_lines(path, count * 2, &mut read)?;
        let rest = (read as u64).next_multiple_of(RECORD as u64) - read as u64;
        if rest > self.stored {
            return Err(refused(path, Refusal::SparseMap));
        }
        self.skip(rest)?;
        self.stored -= rest;
        Ok(numbers.chunks_exact(2).filter_map(|pair| Some((*pair.first()?, *pair.last()?))).collect())
    }

    fn decimal_lines(&mut self, path: &[u8], count: usize, read: &mut usize) -> Result<Vec<u64>, Error> {
        let mut numbers = Vec::new();
        let mut line = Vec::new();
        while numbers.len() < count {
            let byte = match self.data()?.and_then(|data| data.first().copied()) {
                Some(byte) => byte,
                None => return Err(refused(path, Refusal::SparseMap)),
            };
            self.consume(1);
            *read += 1;
            self.check_header_bytes(*read)?;
            if byte == b'\n' {
                numbers.push(at(path, pax::decimal("sparse", &line))?);
                line.clear();
            } else {
                line.push(byte);
            }
        }
        Ok(numbers)
    }

    /// The data of a header that describes the next member.
    fn small(&mut self, header: &Header) -> Result<Vec<u8>, Error> {
        let size = at(&[], header.size())?;
        let length = usize::try_from(size).unwrap_or(usize::MAX);
        self.check_header_bytes(length)?;
        let mut bytes = vec![0; length];
        self.exact(&mut bytes)?;
        self.skip(size.next_multiple_of(RECORD as u64) - size)?;
        Ok(bytes)
    }

    fn check_header_bytes(&self, bytes: usize) -> Result<(), Error> {
        let limit = self.limits.header_bytes;
        if bytes > limit { Err(refused(&[], Refusal::HeaderBytes(limit))) } else { Ok(()) }
    }

    /// The next header; nothing at a block of zeros or where the stream ends between two members.
    fn header(&mut self) -> Result<Option<Header>, Error> {
        let mut record = [0; RECORD];
        if self.source.fill_buf()?.is_empty() {
            return Ok(None);
        }
        self.exact(&mut record)?;
        if record.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        at(&[], Header::parse(record)).map(Some)
    }

    fn exact(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.source.read_exact(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => refused(&[], Refusal::Truncated),
            _ => Error::Io(error),
        })
    }

    fn skip(&mut self, bytes: u64) -> Result<(), Error> {
        let mut left = bytes;
        while left > 0 {
            let available = self.source.fill_buf()?.len();
            if available == 0 {
                return Err(refused(&[], Refusal::Truncated));
            }
            let now = available.min(usize::try_from(left).unwrap_or(usize::MAX));
            self.source.consume(now);
            left -= now as u64;
        }
        Ok(())
    }
}

fn refused(path: &[u8], reason: Refusal) -> Error {
    Error::Refused { path: path.to_vec(), reason }
}

fn at<T>(path: &[u8], result: Result<T, Refusal>) -> Result<T, Error> {
    result.map_err(|reason| refused(path, reason))
}

fn once<T>(slot: &mut Option<T>, value: T, what: &str) -> Result<(), Error> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(refused(&[], Refusal::Twice(what.to_owned()))),
    }
}

/// One of two ways to say the same; readers differ in which they believe, so they must agree.
fn agreed(gnu: Option<Vec<u8>>, pax: Option<Vec<u8>>, what: &str) -> Result<Option<Vec<u8>>, Refusal> {
    match (gnu, pax) {
        (Some(gnu), Some(pax)) if gnu != pax => Err(Refusal::Twice(what.to_owned())),
        (gnu, pax) => Ok(pax.or(gnu)),
    }
}

fn device(header: &Header, kind: DeviceKind) -> Result<Kind, Refusal> {
    let (major, minor) = header.device()?;
    let none = Refusal::DeviceNumbers { major, minor };
    match (u32::try_from(major), u32::try_from(minor)) {
        (Ok(major), Ok(minor)) if major <= MOST_MAJOR && minor <= MOST_MINOR => {
            Ok(Kind::Device { kind, major, minor })
        }
        _ => Err(none),
    }
}
