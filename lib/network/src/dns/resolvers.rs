//! The name servers that the host uses.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ResolversError {
    #[error("cannot read which name servers this host uses in {path}")]
    Read { path: PathBuf, source: io::Error },
}

/// As many as the resolver of the C library asks.
const MOST: usize = 3;

/// The name servers in `/etc/resolv.conf`, in order; a missing file names none.
pub fn system_resolvers() -> Result<Vec<SocketAddr>, ResolversError> {
    let path = Path::new("/etc/resolv.conf");
    match fs::read_to_string(path) {
        Ok(text) => Ok(parse(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(ResolversError::Read { path: path.to_owned(), source }),
    }
}

fn parse(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            if words.next()? != "nameserver" {
                return None;
            }
            let address: IpAddr = words.next()?.parse().ok()?;
            Some(SocketAddr::new(address, super::PORT))
        })
        .take(MOST)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_read_and_all_else_is_passed_over() {
        let text = "# nameserver 1.1.1.1\nsearch example\nnameserver 127.0.0.53 # local\n nameserver\tfd00::1\n\
                    nameserver fe80::1%eth0\nnameserver nonsense\nnameserver\nnameserver 9.9.9.9\nnameserver 8.8.8.8";
        let servers: Vec<String> = parse(text).iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["127.0.0.53:53", "[fd00::1]:53", "9.9.9.9:53"]);
    }
}
