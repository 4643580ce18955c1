//! What things are called: VMs, the site that they belong to, and the devices, tables and files derived from both.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The tap device, by the same name in the namespace of every VM: VMMs keep device names in snapshots.
pub const TAP: &str = "tap0";

/// The end of the uplink that is in the VM's namespace.
pub const UPLINK: &str = "uplink0";

/// A VM as the network knows it: 1 to 64 of `a-z`, `0-9` and `-`, not beginning with `-`. Also the name of its
/// namespace's file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

/// One owner of VM networks on a machine: 1 to 6 of `a-z` and `0-9`, beginning with a letter. Devices and tables begin
/// with it, so two owners with different sites do not touch each other's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SiteName(String);

/// The name of a network device: 1 to 15 bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceName(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("{text:?} cannot name a VM's network (1 to 64 of a-z, 0-9 and -, not beginning with -)")]
    Vm { text: String },
    #[error("{text:?} cannot name a site (1 to 6 of a-z and 0-9, beginning with a letter)")]
    Site { text: String },
    #[error("{text:?} cannot name a network device (1 to 15 visible bytes without / and :)")]
    Device { text: String },
}

impl VmName {
    const LONGEST: usize = 64;

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl SiteName {
    const LONGEST: usize = 6;

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What all our devices on the host's side begin with.
    pub fn prefix(&self) -> String {
        format!("{}-", self.0)
    }

    /// The host's end of a VM's uplink. Two VMs get the same name once in four thousand million pairs; the device's
    /// alias tells whose it is.
    pub fn uplink_of(&self, vm: &VmName) -> DeviceName {
        let digest = hex::encode(Sha256::digest(vm.as_str()));
        DeviceName(self.prefix().chars().chain(digest.chars().take(8)).collect())
    }

    /// What says whose an uplink is.
    pub fn alias_of(&self, vm: &VmName) -> String {
        format!("{}:{}", self.0, vm.0)
    }

    /// The VM that an uplink's alias names, if the alias is one of ours.
    pub fn vm_of(&self, alias: &str) -> Option<VmName> {
        alias.strip_prefix(self.as_str())?.strip_prefix(':')?.parse().ok()
    }

    /// The name of our nftables tables, in the host's namespace and in the VMs'.
    pub fn table(&self) -> &str {
        &self.0
    }
}

impl DeviceName {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn tap() -> Self {
        Self(TAP.to_owned())
    }

    pub fn uplink() -> Self {
        Self(UPLINK.to_owned())
    }
}

impl FromStr for VmName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let good = (1..=Self::LONGEST).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !text.starts_with('-');
        if good { Ok(Self(text.to_owned())) } else { Err(NameError::Vm { text: text.to_owned() }) }
    }
}

impl FromStr for SiteName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let good = (1..=Self::LONGEST).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
            && text.starts_with(|c: char| c.is_ascii_lowercase());
        if good { Ok(Self(text.to_owned())) } else { Err(NameError::Site { text: text.to_owned() }) }
    }
}

impl FromStr for DeviceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let good = (1..=imp_sys::tap::NAME_MAX).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_graphic() && b != b'/' && b != b':')
            && text != "."
            && text != "..";
        if good { Ok(Self(text.to_owned())) } else { Err(NameError::Device { text: text.to_owned() }) }
    }
}

impl TryFrom<String> for VmName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl TryFrom<String> for SiteName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> Self {
        name.0
    }
}

impl From<SiteName> for String {
    fn from(name: SiteName) -> Self {
        name.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for SiteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_leave_their_folder_or_their_option_are_refused() {
        for bad in ["", "-a", "..", "a/b", "A", "a.b", "a\0", &"a".repeat(65)] {
            assert!(bad.parse::<VmName>().is_err(), "{bad:?}");
        }
        for bad in ["", "1a", "toolong", "a-b", "Imp"] {
            assert!(bad.parse::<SiteName>().is_err(), "{bad:?}");
        }
        for bad in ["", "sixteen-bytes-xx", "a b", "a/b", "..", "a:b"] {
            assert!(bad.parse::<DeviceName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_uplink_of_the_longest_site_still_fits_a_device_name() {
        let site: SiteName = "abcdef".parse().unwrap();
        let name = site.uplink_of(&"00112233445566ff".parse().unwrap());
        assert!(name.as_str().parse::<DeviceName>().is_ok(), "{name}");
        assert!(name.as_str().starts_with("abcdef-"));
    }

    #[test]
    fn an_alias_leads_back_to_its_vm_and_to_no_other_sites() {
        let (imp, other): (SiteName, SiteName) = ("imp".parse().unwrap(), "im".parse().unwrap());
        let vm: VmName = "web-1".parse().unwrap();
        assert_eq!(imp.vm_of(&imp.alias_of(&vm)), Some(vm.clone()));
        assert_eq!(other.vm_of(&imp.alias_of(&vm)), None);
        assert_eq!(imp.vm_of("imp:../x"), None);
    }
}
