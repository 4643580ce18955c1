//! The greeting on a guest's channel: finds the start of a conversation in a byte stream that may hold the rest of an
//! earlier one, and settles the protocol version before HTTP/2 begins.
//!
//! ```text
//! host  ─► "\nIMP-HOST <oldest> <newest> <nonce>\n"       16 hex digits of nonce, chosen afresh for every try
//! guest ─► "\nIMP-GUEST <oldest> <newest> <software version> <same nonce>\n"
//! host  ─► "PRI * HTTP/2.0…"                              the host is the HTTP/2 client
//! ```
//!
//! A host that hears nothing within its deadline sends another greeting with another nonce; the guest answers the latest.

use std::fmt;
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Protocol versions this build speaks, both ends included.
pub const OLDEST: u32 = 1;
pub const NEWEST: u32 = 1;

/// A line longer than this is noise from an earlier conversation.
const LONGEST_LINE: usize = 128;
/// Bytes of an earlier conversation that are skipped before a peer is given up: all that a channel can hold.
const MOST_NOISE: usize = 16 << 20;

/// What the guest said of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Newest version that both sides speak.
    pub version: u32,
    /// Software version of the agent.
    pub software: String,
}

/// What the host said of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    /// Newest version that both sides speak.
    pub version: u32,
    pub nonce: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the channel failed during the greeting")]
    Channel(#[from] io::Error),
    #[error("the channel was closed during the greeting")]
    Closed,
    #[error("no greeting within {MOST_NOISE} bytes")]
    Noise,
    #[error("the {side} is too old: it speaks protocol {theirs}, this side needs {ours}; upgrade the {side}")]
    TooOld { side: Side, theirs: Versions, ours: Versions },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Host,
    Guest,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Guest => "guest agent",
        })
    }
}

/// A range of protocol versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    pub oldest: u32,
    pub newest: u32,
}

impl Versions {
    pub const OURS: Self = Self { oldest: OLDEST, newest: NEWEST };

    /// Newest version in both ranges, or which side is behind.
    fn agree(self, theirs: Self, their_side: Side) -> Result<u32, Error> {
        let our_side = match their_side {
            Side::Host => Side::Guest,
            Side::Guest => Side::Host,
        };
        if theirs.newest < self.oldest {
            Err(Error::TooOld { side: their_side, theirs, ours: self })
        } else if self.newest < theirs.oldest {
            Err(Error::TooOld { side: our_side, theirs: self, ours: theirs })
        } else {
            Ok(self.newest.min(theirs.newest))
        }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            write!(f, "{}", self.oldest)
        } else {
            write!(f, "{} to {}", self.oldest, self.newest)
        }
    }
}

/// Greets the guest and returns what it said. `nonce` must differ from those of all earlier tries on this channel.
pub async fn greet<S>(channel: &mut S, ours: Versions, nonce: u64) -> Result<Peer, Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let line = format!("\nIMP-HOST {} {} {nonce:016x}\n", ours.oldest, ours.newest);
    channel.write_all(line.as_bytes()).await?;
    channel.flush().await?;
    let mut noise = 0;
    loop {
        let line = read_line(channel, &mut noise).await?;
        let Some(answer) = GuestLine::parse(&line) else { continue };
        if answer.nonce != nonce {
            continue;
        }
        let version = ours.agree(answer.versions, Side::Guest)?;
        return Ok(Peer { version, software: answer.software });
    }
}

/// Waits for a host's greeting and answers it.
pub async fn answer<S>(channel: &mut S, ours: Versions, software: &str) -> Result<Host, Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut noise = 0;
    loop {
        let line = read_line(channel, &mut noise).await?;
        let Some(greeting) = HostLine::parse(&line) else { continue };
        let line =
            format!("\nIMP-GUEST {} {} {software} {:016x}\n", ours.oldest, ours.newest, greeting.nonce);
        channel.write_all(line.as_bytes()).await?;
        channel.flush().await?;
        let version = ours.agree(greeting.versions, Side::Host)?;
        return Ok(Host { version, nonce: greeting.nonce });
    }
}

/// Whether these bytes are a host's greeting, whole and nothing else.
pub fn is_greeting(bytes: &[u8]) -> bool {
    let line = bytes.strip_prefix(b"\n").and_then(|line| line.strip_suffix(b"\n"));
    line.is_some_and(|line| line.len() <= LONGEST_LINE && HostLine::parse(line).is_some())
}

struct HostLine {
    versions: Versions,
    nonce: u64,
}

impl HostLine {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(line).ok()?.strip_prefix("IMP-HOST ")?.split(' ');
        let versions = Versions { oldest: words.next()?.parse().ok()?, newest: words.next()?.parse().ok()? };
        let nonce = u64::from_str_radix(words.next()?, 16).ok()?;
        words.next().is_none().then_some(Self { versions, nonce })
    }
}

struct GuestLine {
    versions: Versions,
    software: String,
    nonce: u64,
}

impl GuestLine {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(line).ok()?.strip_prefix("IMP-GUEST ")?.split(' ');
        let versions = Versions { oldest: words.next()?.parse().ok()?, newest: words.next()?.parse().ok()? };
        let software = words.next()?.to_owned();
        let nonce = u64::from_str_radix(words.next()?, 16).ok()?;
        words.next().is_none().then_some(Self { versions, software, nonce })
    }
}

/// Next line without its end; of a line that is too long, its last part. Reads byte by byte: nothing after the greeting
/// may be taken from the stream.
async fn read_line<S: AsyncRead + Unpin>(channel: &mut S, noise: &mut usize) -> Result<Vec<u8>, Error> {
    let mut line = Vec::with_capacity(LONGEST_LINE);
    loop {
        let mut byte = [0];
        if channel.read(&mut byte).await? == 0 {
            return Err(Error::Closed);
        }
        *noise += 1;
        if *noise > MOST_NOISE {
            return Err(Error::Noise);
        }
        match byte {
            [b'\n'] => return Ok(line),
            [byte] if line.len() < LONGEST_LINE => line.push(byte),
            [_] => line.clear(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn both_sides_agree_on_the_newest_common_version() {
        let (mut host, mut guest) = tokio::io::duplex(1 << 10);
        let old = Versions { oldest: 1, newest: 3 };
        let new = Versions { oldest: 2, newest: 5 };
        let (host, guest) = tokio::join!(greet(&mut host, old, 7), answer(&mut guest, new, "9.8.7"));
        assert_eq!(host.unwrap(), Peer { version: 3, software: "9.8.7".into() });
        assert_eq!(guest.unwrap().version, 3);
    }

    #[tokio::test]
    async fn each_side_names_the_one_that_is_too_old() {
        let (mut host, mut guest) = tokio::io::duplex(1 << 10);
        let old = Versions { oldest: 1, newest: 1 };
        let new = Versions { oldest: 2, newest: 2 };
        let (host, guest) = tokio::join!(greet(&mut host, new, 7), answer(&mut guest, old, "0.1.0"));
        assert!(matches!(host, Err(Error::TooOld { side: Side::Guest, .. })), "{host:?}");
        assert!(matches!(guest, Err(Error::TooOld { side: Side::Guest, .. })), "{guest:?}");
    }

    #[tokio::test]
    async fn the_rest_of_an_earlier_conversation_is_skipped() {
        let (mut host, mut guest) = tokio::io::duplex(1 << 16);
        guest.write_all(&[0xff; 5000]).await.unwrap();
        guest.write_all(b"\nIMP-GUEST 1 1 0.1.0 0000000000000006\n").await.unwrap();
        host.write_all(b"PRI * HTTP/2.0\r\n\r\nSM").await.unwrap();
        let (host, guest) =
            tokio::join!(greet(&mut host, Versions::OURS, 7), answer(&mut guest, Versions::OURS, "0.1.0"));
        assert_eq!(host.unwrap().version, NEWEST);
        guest.unwrap();
    }

    #[tokio::test]
    async fn endless_noise_is_given_up() {
        let (mut host, guest) = tokio::io::duplex(1 << 20);
        let (mut guest_in, mut guest_out) = tokio::io::split(guest);
        let flood = async { while guest_out.write_all(&[b'x'; 1 << 16]).await.is_ok() {} };
        let drain = async { tokio::io::copy(&mut guest_in, &mut tokio::io::sink()).await };
        let greeting = async {
            let end = greet(&mut host, Versions::OURS, 7).await;
            drop(host);
            end
        };
        let (end, (), _) = tokio::join!(greeting, flood, drain);
        assert!(matches!(end, Err(Error::Noise)), "{end:?}");
    }
}
