//! Which versions of Firecracker machines are run with.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The first whose snapshots and network overrides are as this driver uses them.
const OLDEST: Version = Version { major: 1, minor: 12, patch: 1 };
/// Connections over vsock get lost in this one.
const FAULTY: Version = Version { major: 1, minor: 16, patch: 0 };

/// The first Linux with KVM_CLOCK_REALTIME: without it a load that asks for it fails.
const CLOCK_KERNEL: (u32, u32) = (5, 16);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    #[error("it does not say its version")]
    NoVersion,
    #[error("{found} is older than {OLDEST}: install a newer one")]
    TooOld { found: String },
    #[error("{FAULTY} loses connections to its guests: install {} or later", FAULTY.next())]
    Faulty,
}

impl Version {
    const fn next(self) -> Self {
        Self { patch: self.patch + 1, ..self }
    }

    /// After 1.16.0 the clock of a guest stands still in a snapshot unless it is told otherwise when it is loaded, which
    /// takes a kernel that can set a guest's clock by its own.
    pub(crate) fn clock(self, kernel_release: &str) -> Clock {
        let mut numbers = kernel_release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
        let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
            return Clock::Unsaid;
        };
        if self > FAULTY && (major, minor) >= CLOCK_KERNEL { Clock::GoesOn } else { Clock::Unsaid }
    }
}

/// What is said of a guest's clock when its snapshot is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    GoesOn,
    /// This version has no word for it, or this kernel cannot do it.
    Unsaid,
}

/// What `firecracker --version` says: "Firecracker v1.12.1", and more on other lines.
pub(crate) fn usable(text: &str) -> Result<Version, Unusable> {
    let word =
        text.lines().next().and_then(|line| line.split_once("Firecracker v")).map(|(_, word)| word.trim());
    let word = word.ok_or(Unusable::NoVersion)?;
    // A version that is about to be released comes before the released one.
    let (numbers, unreleased) = match word.split_once(['-', '+']) {
        Some((numbers, _)) => (numbers, true),
        None => (word, false),
    };
    let mut parts = numbers.split('.').map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch)), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(Unusable::NoVersion);
    };
    let version = Version { major, minor, patch };
    if version < OLDEST || (version == OLDEST && unreleased) {
        return Err(Unusable::TooOld { found: word.to_owned() });
    }
    if version == FAULTY || (version == FAULTY.next() && unreleased) {
        return Err(Unusable::Faulty);
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_are_too_old_or_lose_connections_are_refused() {
        let old = |found: &str| Err(Unusable::TooOld { found: found.into() });
        let fine = |major, minor, patch| Ok(Version { major, minor, patch });
        for (text, verdict) in [
            (
                "Firecracker v1.12.1\n\n2025-01-01T00:00:00 [anonymous-instance:main] exiting\n",
                fine(1, 12, 1),
            ),
            ("Firecracker v1.12.0", old("1.12.0")),
            ("Firecracker v1.12.1-dev", old("1.12.1-dev")),
            ("Firecracker v1.9.12", old("1.9.12")),
            ("Firecracker v0.25.2", old("0.25.2")),
            ("Firecracker v1.13.0", fine(1, 13, 0)),
            ("Firecracker v1.15.9", fine(1, 15, 9)),
            ("Firecracker v1.16.0", Err(Unusable::Faulty)),
            ("Firecracker v1.16.0-dev", Err(Unusable::Faulty)),
            ("Firecracker v1.16.1-alpha", Err(Unusable::Faulty)),
            ("Firecracker v1.16.1", fine(1, 16, 1)),
            ("Firecracker v2.0.0", fine(2, 0, 0)),
            ("Firecracker v1.12", Err(Unusable::NoVersion)),
            ("Firecracker v1.12.1.4", Err(Unusable::NoVersion)),
            ("QEMU emulator version 7.2.22", Err(Unusable::NoVersion)),
            ("", Err(Unusable::NoVersion)),
        ] {
            assert_eq!(usable(text), verdict, "{text}");
        }
    }

    #[test]
    fn a_refusal_says_what_to_install() {
        assert!(usable("Firecracker v1.16.0").unwrap_err().to_string().contains("1.16.1"));
        assert!(usable("Firecracker v1.2.0").unwrap_err().to_string().contains("1.12.1"));
    }

    #[test]
    fn clocks_are_told_to_go_on_where_they_can_be() {
        for (version, kernel, clock) in [
            ("1.12.1", "6.12.117+deb12-cloud-amd64", Clock::Unsaid),
            ("1.15.0", "6.1.0-40-amd64", Clock::Unsaid),
            ("1.16.1", "6.1.0-40-amd64", Clock::GoesOn),
            ("1.16.1", "5.16.0", Clock::GoesOn),
            ("1.16.1", "5.10.0-32-amd64", Clock::Unsaid),
            ("1.16.1", "unknown", Clock::Unsaid),
            ("2.0.0", "7.0-rc1", Clock::GoesOn),
        ] {
            let found = usable(&format!("Firecracker v{version}")).unwrap();
            assert_eq!(found.clock(kernel), clock, "{version} on {kernel}");
        }
    }
}
