//! Users and groups as the guest's own /etc/passwd and /etc/group say, without the C library's name service: a static
//! binary has none, and an image may have neither file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of either file that are read: an image may put anything there.
const MOST: u64 = 1 << 20;
/// Supplementary groups the kernel takes (NGROUPS_MAX).
const MOST_GROUPS: usize = 65_536;

/// Not an id: to the kernel it means that the process keeps the one it has, which is root's.
const LEAVE_AS_IS: u32 = u32::MAX;

/// Who a process runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) home: Vec<u8>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Error {
    #[error(
        "there is no user {0:?} in the guest's /etc/passwd; use a number below {LEAVE_AS_IS}, or add the user to the image"
    )]
    NoUser(String),
    #[error(
        "there is no group {0:?} in the guest's /etc/group; use a number below {LEAVE_AS_IS}, or add the group to the image"
    )]
    NoGroup(String),
}

/// The text of both files.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

impl Accounts {
    /// Reads both files; one that is missing or unreadable is empty.
    pub(crate) fn read() -> Self {
        Self { passwd: read_bounded(Path::new("/etc/passwd")), group: read_bounded(Path::new("/etc/group")) }
    }

    /// Resolves "user", "uid", "user:group" or "uid:gid"; empty is 0:0.
    pub(crate) fn resolve(&self, who: &str) -> Result<Account, Error> {
        let (user, group) = who.split_once(':').map_or((who, None), |(user, group)| (user, Some(group)));
        let user = if user.is_empty() { "0" } else { user };
        // As other container engines do: a name is looked up first, even one made of digits.
        let entry = self.passwd().find(|entry| entry.name == user.as_bytes());
        let number = number(user.as_bytes());
        let entry = entry.or_else(|| self.passwd().find(|entry| Some(entry.uid) == number));
        let (uid, entry_gid, name, home) = match (entry, number) {
            (Some(entry), _) => (entry.uid, entry.gid, entry.name, entry.home),
            (None, Some(uid)) => (uid, 0, &b""[..], &b"/"[..]),
            (None, None) => return Err(Error::NoUser(user.to_owned())),
        };
        let home = if home.is_empty() { b"/" } else { home }.to_vec();
        match group {
            // A group that was named stands alone, as in an OCI configuration.
            Some(group) if !group.is_empty() => {
                Ok(Account { uid, gid: self.gid(group)?, groups: Vec::new(), home })
            }
            _ => Ok(Account { uid, gid: entry_gid, groups: self.memberships(name, entry_gid), home }),
        }
    }

    pub(crate) fn user_name(&self, uid: u32) -> Option<&[u8]> {
        self.passwd().find(|entry| entry.uid == uid).map(|entry| entry.name)
    }

    pub(crate) fn group_name(&self, gid: u32) -> Option<&[u8]> {
        self.groups().find(|entry| entry.gid == gid).map(|entry| entry.name)
    }

    fn gid(&self, group: &str) -> Result<u32, Error> {
        let named = self.groups().find(|entry| entry.name == group.as_bytes()).map(|entry| entry.gid);
        named.or_else(|| number(group.as_bytes())).ok_or_else(|| Error::NoGroup(group.to_owned()))
    }

    fn memberships(&self, user: &[u8], first: u32) -> Vec<u32> {
        let mut groups = vec![first];
        if user.is_empty() {
            return groups;
        }
        for entry in
            self.groups().filter(|entry| entry.members.split(|byte| *byte == b',').any(|name| name == user))
        {
            if !groups.contains(&entry.gid) && groups.len() < MOST_GROUPS {
                groups.push(entry.gid);
            }
        }
        groups
    }

    fn passwd(&self) -> impl Iterator<Item = PasswdEntry<'_>> {
        self.passwd.split(|byte| *byte == b'\n').filter_map(|line| {
            let mut fields = line.split(|byte| *byte == b':');
            let name = fields.next()?;
            let uid = number(fields.nth(1)?)?;
            let gid = number(fields.next()?)?;
            let home = fields.nth(1).unwrap_or_default();
            Some(PasswdEntry { name, uid, gid, home })
        })
    }

    fn groups(&self) -> impl Iterator<Item = GroupEntry<'_>> {
        self.group.split(|byte| *byte == b'\n').filter_map(|line| {
            let mut fields = line.split(|byte| *byte == b':');
            let name = fields.next()?;
            let gid = number(fields.nth(1)?)?;
            Some(GroupEntry { name, gid, members: fields.next().unwrap_or_default() })
        })
    }
}

struct PasswdEntry<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

struct GroupEntry<'a> {
    name: &'a [u8],
    gid: u32,
    members: &'a [u8],
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok().filter(|id| *id != LEAVE_AS_IS)
}

fn read_bounded(path: &Path) -> Vec<u8> {
    let mut content = Vec::new();
    if let Ok(file) = File::open(path)
        && file.metadata().is_ok_and(|metadata| metadata.is_file())
        && file.take(MOST).read_to_end(&mut content).is_err()
    {
        content.clear();
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        Accounts {
            passwd: b"root:x:0:0:root:/root:/bin/sh\nbroken\napp:x:1000:1001::/srv/app:/bin/false\n\
                77:x:5:6::/odd:\nhomeless:x:9:9\n"
                .to_vec(),
            group:
                b"root:x:0:\napp:x:1001:\ndisk:x:6:app,other\nwheel:x:10:other,app\napplause:x:11:applause\n"
                    .to_vec(),
        }
    }

    #[test]
    fn a_user_by_name_gets_its_group_its_memberships_and_its_home() {
        let account = accounts().resolve("app").unwrap();
        assert_eq!(
            account,
            Account { uid: 1000, gid: 1001, groups: vec![1001, 6, 10], home: b"/srv/app".to_vec() }
        );
        assert_eq!(accounts().resolve("1000").unwrap(), account);
    }

    #[test]
    fn a_named_group_stands_alone() {
        let account = accounts().resolve("app:disk").unwrap();
        assert_eq!((account.uid, account.gid, account.groups), (1000, 6, vec![]));
        assert_eq!(accounts().resolve("app:4242").unwrap().gid, 4242);
        assert_eq!(accounts().resolve(":disk").unwrap().uid, 0);
    }

    #[test]
    fn numbers_need_no_entry_and_names_do() {
        let account = Accounts::default().resolve("4000000000:5").unwrap();
        assert_eq!((account.uid, account.gid, account.home), (4_000_000_000, 5, b"/".to_vec()));
        assert_eq!(Accounts::default().resolve("").unwrap().uid, 0);
        assert_eq!(accounts().resolve("nobody"), Err(Error::NoUser("nobody".into())));
        assert_eq!(accounts().resolve("app:nogroup"), Err(Error::NoGroup("nogroup".into())));
    }

    #[test]
    fn the_number_that_would_leave_a_process_roots_is_nobodys() {
        let number = u32::MAX.to_string();
        assert_eq!(accounts().resolve(&number), Err(Error::NoUser(number.clone())));
        assert_eq!(accounts().resolve(&format!("app:{number}")), Err(Error::NoGroup(number.clone())));
        let odd = Accounts { passwd: format!("odd:x:{number}:0::/:\n").into(), group: Vec::new() };
        assert_eq!(odd.resolve("odd"), Err(Error::NoUser("odd".into())));
    }

    #[test]
    fn a_name_made_of_digits_wins_over_the_number() {
        assert_eq!(accounts().resolve("77").unwrap().uid, 5);
    }
}
