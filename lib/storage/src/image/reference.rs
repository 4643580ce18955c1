//! What a user types to name an image, parsed the way Docker parses it.
//!
//! The grammar is that of the distribution project's reference package: `[domain/]path[:tag][@digest]`. The first part is a
//! domain if it has a dot, a colon or an upper-case letter, or is `localhost`; everything else is a path on the default
//! domain. This file is the one place that knows the default domain.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::blob::digest::{self, Digest};

/// Domain of a reference that names none.
const DEFAULT_DOMAIN: &str = "docker.io";
/// Other spelling of the default domain.
const DEFAULT_DOMAIN_ALIAS: &str = "index.docker.io";
/// Where the default domain's registry API answers.
const DEFAULT_API_HOST: &str = "registry-1.docker.io";
/// Key of the default domain's credentials in Docker's configuration files.
const DEFAULT_CREDENTIALS_KEY: &str = "https://index.docker.io/v1/";
/// Repositories without a namespace on the default domain are in this one.
const DEFAULT_NAMESPACE: &str = "library";
const DEFAULT_TAG: &str = "latest";
const LONGEST_REPOSITORY: usize = 255;
const LONGEST_TAG: usize = 128;
const LONGEST_DOMAIN: usize = 255;

/// An image in a registry. Its text is canonical: domain, repository, and a tag or a digest or both.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    domain: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("the image name is empty")]
    Empty,
    #[error("{0:?} is a bare hex id, not an image name")]
    BareId(String),
    #[error("image name {0:?}: the repository must be lower case")]
    UpperCase(String),
    #[error(
        "image name {0:?}: {1:?} is not a repository path (lower-case letters, digits, and single . _ - between them)"
    )]
    Repository(String, String),
    #[error("image name {0:?}: the repository is longer than {LONGEST_REPOSITORY} characters")]
    TooLong(String),
    #[error("image name {0:?}: {1:?} is not a registry host")]
    Domain(String, String),
    #[error("image name {0:?}: {1:?} is not a tag (letters, digits, . _ -, at most {LONGEST_TAG})")]
    Tag(String, String),
    #[error("image name {0:?}")]
    Digest(String, #[source] digest::Error),
    #[error("{0:?} names no file: expected {1}:PATH[:NAME]")]
    NoPath(String, &'static str),
}

impl Reference {
    /// Registry host and optional port, as written: the key of settings.
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// Path of the repository in its registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// None only if there is a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// Host and optional port at which the registry's API answers.
    pub fn api_host(&self) -> &str {
        api_host(&self.domain)
    }

    /// Key of the registry's credentials in Docker's configuration files.
    pub fn credentials_key(&self) -> &str {
        if self.domain == DEFAULT_DOMAIN { DEFAULT_CREDENTIALS_KEY } else { &self.domain }
    }

    /// The shortest text that parses to this reference, as `docker image ls` shows it.
    pub fn familiar(&self) -> String {
        let text = self.to_string();
        let Some(rest) = text.strip_prefix(DEFAULT_DOMAIN).and_then(|rest| rest.strip_prefix('/')) else {
            return text;
        };
        let in_namespace = rest.strip_prefix(DEFAULT_NAMESPACE).and_then(|rest| rest.strip_prefix('/'));
        match in_namespace {
            Some(short) if !short.contains('/') && short.parse::<Self>().as_ref() == Ok(self) => {
                short.to_owned()
            }
            _ if rest.parse::<Self>().as_ref() == Ok(self) => rest.to_owned(),
            _ => text,
        }
    }
}

/// Host and optional port at which the API of a domain's registry answers.
fn api_host(domain: &str) -> &str {
    if domain == DEFAULT_DOMAIN { DEFAULT_API_HOST } else { domain }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.is_empty() {
            return Err(Error::Empty);
        }
        let whole = || -> String { text.chars().take(300).collect() };
        if text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(Error::BareId(whole()));
        }
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => {
                (name, Some(digest.parse().map_err(|error| Error::Digest(whole(), error))?))
            }
            None => (text, None),
        };
        let path_start = name.rfind('/').map_or(0, |slash| slash + 1);
        let (name, tag) = match name.rfind(':') {
            Some(colon) if colon >= path_start => {
                let (name, tag) = name.split_at(colon);
                (name, tag.strip_prefix(':'))
            }
            _ => (name, None),
        };
        let (domain, path) = split_domain(name);
        let repository = if domain == DEFAULT_DOMAIN && !path.contains('/') {
            format!("{DEFAULT_NAMESPACE}/{path}")
        } else {
            path.to_owned()
        };
        if !is_domain(domain) {
            return Err(Error::Domain(whole(), domain.chars().take(300).collect()));
        }
        if repository.len() > LONGEST_REPOSITORY {
            return Err(Error::TooLong(whole()));
        }
        if path.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(Error::UpperCase(whole()));
        }
        if !path.split('/').all(is_path_component) {
            return Err(Error::Repository(whole(), path.to_owned()));
        }
        if let Some(tag) = tag
            && !is_tag(tag)
        {
            return Err(Error::Tag(whole(), tag.chars().take(300).collect()));
        }
        let tag = match (tag, digest) {
            (Some(tag), _) => Some(tag.to_owned()),
            (None, Some(_)) => None,
            (None, None) => Some(DEFAULT_TAG.to_owned()),
        };
        Ok(Self { domain: domain.to_owned(), repository, tag, digest })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domain, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl Serialize for Reference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Reference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

fn split_domain(name: &str) -> (&str, &str) {
    let Some((first, rest)) = name.split_once('/') else { return (DEFAULT_DOMAIN, name) };
    let is_domain = first.contains(['.', ':'])
        || first == "localhost"
        || first.bytes().any(|byte| byte.is_ascii_uppercase());
    match (is_domain, first) {
        (false, _) => (DEFAULT_DOMAIN, name),
        (true, DEFAULT_DOMAIN_ALIAS) => (DEFAULT_DOMAIN, rest),
        (true, domain) => (domain, rest),
    }
}

/// Whether this is a host name, an IPv4 address or a bracketed IPv6 address, with an optional port.
pub(crate) fn is_domain(text: &str) -> bool {
    let (host_is_good, port) = if let Some(rest) = text.strip_prefix('[') {
        let Some((address, port)) = rest.split_once(']') else { return false };
        (address.parse::<std::net::Ipv6Addr>().is_ok(), port)
    } else {
        let end = text.find(':').unwrap_or(text.len());
        let (host, port) = text.split_at(end);
        (host.split('.').all(is_host_component), port)
    };
    let port_is_good = match port.strip_prefix(':') {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_digit()) && digits.parse::<u16>().is_ok(),
        None => port.is_empty(),
    };
    host_is_good && port_is_good && text.len() <= LONGEST_DOMAIN
}

fn is_host_component(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Runs of letters and digits with one separator between them: a dot, one or two underscores, or any number of dashes.
fn is_path_component(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let good_end = |byte: Option<&u8>| byte.is_some_and(|byte| alphanumeric(*byte));
    good_end(bytes.first())
        && good_end(bytes.last())
        && text.split(|letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit()).all(
            |separator| {
                matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|byte| byte == b'-')
            },
        )
}

pub(crate) fn is_tag(text: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= LONGEST_TAG
        && text.bytes().next().is_some_and(word)
        && text.bytes().all(|byte| word(byte) || matches!(byte, b'.' | b'-'))
}

/// Where an image comes from: a registry, or files on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Registry(Reference),
    Archive(Archive),
}

/// Images in files: `oci:DIR[:NAME]`, `oci-archive:FILE[:NAME]`, `docker-archive:FILE[:NAME]`. The path ends at the first
/// colon. An image that is really called `oci` is written `library/oci:TAG`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    pub format: ArchiveFormat,
    pub path: PathBuf,
    /// The one image to take; without it, all of them.
    pub name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchiveFormat {
    /// A directory in the OCI image layout.
    OciLayout,
    /// A tar of an OCI image layout.
    OciArchive,
    /// What `docker save` writes.
    DockerArchive,
}

impl ArchiveFormat {
    const ALL: [Self; 3] = [Self::OciLayout, Self::OciArchive, Self::DockerArchive];

    pub const fn prefix(self) -> &'static str {
        match self {
            Self::OciLayout => "oci",
            Self::OciArchive => "oci-archive",
            Self::DockerArchive => "docker-archive",
        }
    }
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        for format in ArchiveFormat::ALL {
            let rest = text.strip_prefix(format.prefix()).and_then(|rest| rest.strip_prefix(':'));
            let Some(rest) = rest else { continue };
            let (path, name) = match rest.split_once(':') {
                Some((path, name)) => (path, Some(name.to_owned())),
                None => (rest, None),
            };
            if path.is_empty() || name.as_deref() == Some("") {
                return Err(Error::NoPath(text.to_owned(), format.prefix()));
            }
            return Ok(Self::Archive(Archive { format, path: path.into(), name }));
        }
        text.parse().map(Self::Registry)
    }
}

impl fmt::Display for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.format.prefix(), self.path.display())?;
        match &self.name {
            Some(name) => write!(f, ":{name}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry(reference) => reference.fmt(f),
            Self::Archive(archive) => archive.fmt(f),
        }
    }
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;
