//! The flags of a machine and of its program, which `imp run` and `imp template build` share.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use imp_runtime::spec::{DiskSize, Memory};

use crate::value;

#[derive(Debug, Args)]
pub(crate) struct Machine {
    /// Who runs the program: a name or number of the guest, and a group [default: the image's, else root]
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Where the program runs; made when missing [default: the image's, else /]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// The program in the place of the image's ENTRYPOINT and CMD; empty: only COMMAND
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,
    /// Signal that asks the program to end [default: the image's, else SIGTERM]
    #[arg(long, value_name = "SIGNAL", value_parser = signal)]
    pub(crate) stop_signal: Option<String>,
    /// What connects the guest [default: what the driver does best; `bridge` with Firecracker, `user` with QEMU]
    #[arg(long, value_enum, value_name = "MODE")]
    pub(crate) network: Option<Network>,

    /// Processors of the guest; a part limits their time, as in 1.5 [default: 1]
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, value_parser = value::cpu_millis)]
    pub(crate) cpus: Option<u32>,
    /// Memory of the guest, with k, m or g [default: 256m]
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) memory: Option<Memory>,
    /// Largest size of the VM's private disk, with m, g or t [default: 10g]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) disk: Option<DiskSize>,
    /// Most processes of the program's tree; 0 or -1: no limit
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    pub(crate) pids_limit: Option<i64>,
    /// Most open files of the program, as in nofile=1024
    #[arg(long = "ulimit", value_name = "nofile=NUMBER", allow_hyphen_values = true)]
    pub(crate) ulimits: Vec<Ulimit>,
    /// Most bytes a second to and from the VM's disks, with k, m or g
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = disk_bytes_per_second)]
    pub(crate) disk_bps: Option<u64>,
    /// Most requests a second to and from the VM's disks
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, value_parser = disk_requests_per_second)]
    pub(crate) disk_iops: Option<u64>,
    /// Most bytes a second over the network, each way, with k, m or g; Firecracker and bridge networks only
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = value::bytes)]
    pub(crate) network_bps: Option<u64>,
    /// Most packets a second over the network, each way; Firecracker and bridge networks only
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, value_parser = value::number)]
    pub(crate) network_pps: Option<u64>,
    /// Kernel: a vmlinux file, or the digest of an installed bundle [default: the installed default]
    #[arg(long, value_name = "FILE|DIGEST")]
    pub(crate) kernel: Option<String>,

    /// When the registry is asked for the image
    #[arg(long, value_enum, default_value = "missing", value_name = "WHEN")]
    pub(crate) pull: Pull,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Network {
    /// A tap with filters and translation in the kernel; needs root
    Bridge,
    /// A process without privileges: what this machine reaches, but not its loopback; QEMU only
    User,
    /// Nothing but its own loopback
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pull {
    /// Every time
    Always,
    /// If the image is not here
    Missing,
    /// Not at all
    Never,
}

/// As it is written; the guest gets it like that.
fn signal(text: &str) -> anyhow::Result<String> {
    imp_protocol::signal::number(text)?;
    Ok(text.to_owned())
}

/// A guest reads megabytes before its program starts: with less than these it never does, and nobody sees why.
const LEAST_DISK_BYTES: u64 = 64 << 10;
const LEAST_DISK_REQUESTS: u64 = 10;

fn disk_bytes_per_second(text: &str) -> anyhow::Result<u64> {
    let bytes = value::bytes(text)?;
    anyhow::ensure!(
        bytes == 0 || bytes >= LEAST_DISK_BYTES,
        "with less than 64k a second a guest does not even start; 0 is no limit"
    );
    Ok(bytes)
}

fn disk_requests_per_second(text: &str) -> anyhow::Result<u64> {
    let requests = value::number(text)?;
    anyhow::ensure!(
        requests == 0 || requests >= LEAST_DISK_REQUESTS,
        "with less than {LEAST_DISK_REQUESTS} requests a second a guest does not even start; 0 is no limit"
    );
    Ok(requests)
}

/// `--ulimit nofile=…`, for the soft and the hard limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ulimit {
    pub(crate) open_files: u32,
}

impl FromStr for Ulimit {
    type Err = NotALimit;

    fn from_str(text: &str) -> Result<Self, NotALimit> {
        let limits = text.strip_prefix("nofile=").ok_or(NotALimit)?;
        let (soft, hard) = limits.split_once(':').unwrap_or((limits, limits));
        match (soft.parse::<u32>(), hard.parse()) {
            (Ok(soft), Ok(hard)) if soft == hard && hard > 0 => Ok(Self { open_files: hard }),
            _ => Err(NotALimit),
        }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "write nofile=NUMBER, which is the soft and the hard limit; others are for the guest to set, as with `ulimit -S -n`"
)]
pub(crate) struct NotALimit;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_limits_open_files() {
        let open_files = |text: &str| text.parse::<Ulimit>().map(|limit| limit.open_files);
        assert_eq!(open_files("nofile=1024"), Ok(1024));
        assert_eq!(open_files("nofile=1024:1024"), Ok(1024));
        for bad in ["nofile=1024:2048", "nofile=1:1:1", "nproc=1", "nofile=", "nofile=-1", "nofile=0"] {
            assert_eq!(open_files(bad), Err(NotALimit), "{bad}");
        }
    }
}
