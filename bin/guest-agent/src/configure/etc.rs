//! The files that name hosts: /etc/hostname, /etc/hosts, /etc/resolv.conf.
//!
//! An image may have them, lack them, or have links that lead nowhere (to what its own init would have made). A file is
//! replaced, a dangling link too; a link that leads to a file is the image's own arrangement and stays.

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use imp_protocol::guest::ConfigureRequest;

use crate::log;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ParseError {
    #[error("`{field}` must be IP addresses, not {text:?}")]
    Address { field: &'static str, text: String },
    #[error("names of hosts and domains have no spaces, '#' or control characters: {0:?}")]
    Name(String),
}

/// What the files will say.
#[derive(Debug, Default)]
pub(crate) struct Names {
    hostname: Option<String>,
    hosts: Vec<(IpAddr, Vec<String>)>,
    /// Own addresses, for the own name in /etc/hosts.
    own: Vec<IpAddr>,
    nameservers: Vec<IpAddr>,
    search: Vec<String>,
}

impl Names {
    pub(crate) fn parse(request: &ConfigureRequest) -> Result<Self, ParseError> {
        let mut names = Self {
            hostname: Some(request.hostname.clone()).filter(|name| !name.is_empty()),
            ..Self::default()
        };
        for entry in &request.hosts {
            names.hosts.push((
                address("hosts", &entry.address)?,
                entry.names.iter().map(|it| name(it)).collect::<Result<_, _>>()?,
            ));
        }
        if let Some(network) = &request.network {
            for own in &network.addresses {
                names.own.push(address("addresses", own.split('/').next().unwrap_or_default())?);
            }
            names.nameservers =
                network.nameservers.iter().map(|it| address("nameservers", it)).collect::<Result<_, _>>()?;
            names.search = network.search_domains.iter().map(|it| name(it)).collect::<Result<_, _>>()?;
        }
        Ok(names)
    }

    fn hosts_file(&self) -> String {
        let mut text = String::from("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n");
        if let Some(hostname) = &self.hostname {
            let short = hostname.split('.').next().filter(|short| *short != hostname);
            let names = short.map_or_else(|| hostname.clone(), |short| format!("{hostname} {short}"));
            if self.own.is_empty() {
                let _ = writeln!(text, "127.0.1.1 {names}");
            }
            for own in &self.own {
                let _ = writeln!(text, "{own} {names}");
            }
        }
        for (address, names) in &self.hosts {
            let _ = writeln!(text, "{address} {}", names.join(" "));
        }
        text
    }

    fn resolver_file(&self) -> Option<String> {
        if self.nameservers.is_empty() {
            return None;
        }
        let mut text = String::new();
        for server in &self.nameservers {
            let _ = writeln!(text, "nameserver {server}");
        }
        if !self.search.is_empty() {
            let _ = writeln!(text, "search {}", self.search.join(" "));
        }
        Some(text)
    }
}

fn address(field: &'static str, text: &str) -> Result<IpAddr, ParseError> {
    text.parse().map_err(|_| ParseError::Address { field, text: text.to_owned() })
}

fn name(text: &str) -> Result<String, ParseError> {
    let allowed = |letter: char| !letter.is_whitespace() && !letter.is_control() && letter != '#';
    if !text.is_empty() && text.chars().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err(ParseError::Name(text.to_owned()))
    }
}

/// Writes the files below `etc`. One that cannot be written is logged: a machine without it still runs.
pub(crate) fn write(etc: &Path, names: &Names) {
    let hosts = (names.hostname.is_some() || !names.hosts.is_empty() || !etc.join("hosts").exists())
        .then(|| names.hosts_file());
    let files = [
        ("hostname", names.hostname.as_ref().map(|name| format!("{name}\n"))),
        ("hosts", hosts),
        ("resolv.conf", names.resolver_file()),
    ];
    for (name, content) in files {
        if let Some(content) = content
            && let Err(error) = write_file(etc, name, content.as_bytes())
        {
            log::warn(format_args!("/etc/{name} not written: {error}"));
        }
    }
}

/// Replaces a file, or writes it where it cannot be replaced.
pub(crate) fn write_file(etc: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let path = etc.join(name);
    if fs::read(&path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_symlink() && path.exists() => return Ok(()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            DirBuilder::new().recursive(true).mode(0o755).create(etc)?;
        }
        Err(error) => return Err(error),
    }
    let temporary = etc.join(format!(".imp-{name}"));
    let _ = fs::remove_file(&temporary);
    let mut file = File::options().write(true).create_new(true).mode(0o644).open(&temporary)?;
    let written = file.write_all(content).and_then(|()| fs::rename(&temporary, &path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
        // A file that is a mount point cannot be replaced, only written.
        return fs::write(&path, content);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use imp_protocol::guest::{HostEntry, NetworkInterface};

    use super::*;

    fn request() -> ConfigureRequest {
        ConfigureRequest {
            hostname: "web.example".into(),
            hosts: vec![HostEntry {
                address: "10.0.0.9".into(),
                names: vec!["db".into(), "db.example".into()],
            }],
            network: Some(NetworkInterface {
                addresses: vec!["10.0.2.15/24".into(), "fd00::15/64".into()],
                nameservers: vec!["10.0.2.3".into()],
                search_domains: vec!["example".into()],
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn files_are_made_where_the_image_has_none_and_dangling_links_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let etc = directory.path().join("etc");
        fs::create_dir(&etc).unwrap();
        std::os::unix::fs::symlink("../run/nothing/stub.conf", etc.join("resolv.conf")).unwrap();
        write(&etc, &Names::parse(&request()).unwrap());
        let read = |name: &str| fs::read_to_string(etc.join(name)).unwrap();
        assert_eq!(read("hostname"), "web.example\n");
        assert_eq!(read("resolv.conf"), "nameserver 10.0.2.3\nsearch example\n");
        let hosts = read("hosts");
        for line in [
            "127.0.0.1 localhost",
            "10.0.2.15 web.example web",
            "fd00::15 web.example web",
            "10.0.0.9 db db.example",
        ] {
            assert!(hosts.lines().any(|it| it == line), "{hosts}");
        }
        assert!(!directory.path().join("run").exists());
    }

    #[test]
    fn a_link_to_a_file_is_the_image_s_own() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("real"), "kept").unwrap();
        std::os::unix::fs::symlink("real", directory.path().join("resolv.conf")).unwrap();
        write(directory.path(), &Names::parse(&request()).unwrap());
        assert_eq!(fs::read_to_string(directory.path().join("real")).unwrap(), "kept");
    }

    #[test]
    fn names_cannot_smuggle_lines_into_the_files() {
        let mut bad = request();
        bad.hosts[0].names[0] = "x\n1.2.3.4 bank".into();
        assert!(matches!(Names::parse(&bad), Err(ParseError::Name(_))));
        let mut bad = request();
        bad.network.as_mut().unwrap().nameservers[0] = "dns".into();
        assert!(matches!(Names::parse(&bad), Err(ParseError::Address { field: "nameservers", .. })));
    }
}
