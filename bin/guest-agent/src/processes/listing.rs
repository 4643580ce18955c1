//! Every process in the guest, from /proc.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read;

use imp_protocol::guest;

use super::tree;

/// Bytes of a command line that are reported.
const LONGEST_COMMAND_LINE: u64 = 4 << 10;

/// PF_KTHREAD of linux/sched.h.
const KERNEL_THREAD: u64 = 0x20_0000;

/// The fields of /proc/PID/stat that matter here.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    state: char,
    parent: u32,
    session: u32,
    flags: u64,
    cpu_ticks: u64,
    resident_pages: u64,
}

impl Stat {
    /// The name in parentheses may hold anything, so the fields are those after the last one.
    fn parse(text: &str) -> Option<Self> {
        let (_, fields) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            state: fields.first()?.chars().next()?,
            parent: number(1)? as u32,
            session: number(3)? as u32,
            flags: number(6)?,
            cpu_ticks: number(11)? + number(12)?,
            resident_pages: number(21)?,
        })
    }

    fn of(pid: u32) -> Option<Self> {
        // A name need not be UTF-8.
        let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse(&String::from_utf8_lossy(&text))
    }
}

pub(crate) fn all() -> Vec<guest::Process> {
    let nanoseconds_per_tick = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
    let page = rustix::param::page_size() as u64;
    pids()
        .into_iter()
        .filter_map(|pid| {
            let stat = Stat::of(pid)?;
            let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            Some(guest::Process {
                pid,
                parent_pid: stat.parent,
                uid: owner(pid).unwrap_or_default(),
                state: stat.state.to_string(),
                command_line: command_line(pid).into(),
                resident_bytes: stat.resident_pages * page,
                cpu_nanoseconds: stat.cpu_ticks * nanoseconds_per_tick,
                exec_id: tree::exec_of(&cgroup).unwrap_or_default().to_owned(),
            })
        })
        .collect()
}

/// Whether it runs in the kernel alone. One that has ended counts as none.
pub(crate) fn is_kernel_thread(pid: u32) -> bool {
    Stat::of(pid).is_some_and(|stat| stat.flags & KERNEL_THREAD != 0)
}

pub(crate) fn count() -> u32 {
    pids().len() as u32
}

/// `leader`, the members of its session, and all whose line of parents leads to one of them.
pub(crate) fn descendants(leader: u32) -> Vec<u32> {
    let stats: HashMap<u32, Stat> =
        pids().into_iter().filter_map(|pid| Some((pid, Stat::of(pid)?))).collect();
    let mut found: HashSet<u32> =
        stats.iter().filter(|(_, stat)| stat.session == leader).map(|(pid, _)| *pid).collect();
    found.extend(stats.contains_key(&leader).then_some(leader));
    loop {
        let before = found.len();
        found.extend(
            stats
                .iter()
                .filter(|(_, stat)| found.contains(&stat.parent))
                .map(|(pid, _)| *pid)
                .collect::<Vec<_>>(),
        );
        if found.len() == before {
            return found.into_iter().collect();
        }
    }
}

fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn owner(pid: u32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    Some(fs::metadata(format!("/proc/{pid}")).ok()?.uid())
}

/// Arguments apart by spaces; of a kernel thread, its name in brackets.
fn command_line(pid: u32) -> Vec<u8> {
    let mut line = Vec::new();
    if let Ok(file) = File::open(format!("/proc/{pid}/cmdline")) {
        let _ = file.take(LONGEST_COMMAND_LINE).read_to_end(&mut line);
    }
    while line.last() == Some(&0) {
        line.pop();
    }
    for byte in &mut line {
        if *byte == 0 {
            *byte = b' ';
        }
    }
    if line.is_empty() {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        line = format!("[{}]", name.trim_end()).into_bytes();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_imitates_the_file_s_format_is_not_believed() {
        let text = "42 (evil) S 1 (x) R 7 8 9 0 -1 4194304 1 2 3 4 50 60 0 0 20 0 1 0 100 4096 33 1 1";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(
            stat,
            Stat { state: 'R', parent: 7, session: 9, flags: 0x40_0000, cpu_ticks: 110, resident_pages: 33 }
        );
        assert_eq!(Stat::parse("42 (short) R 1"), None);
    }

    #[test]
    fn this_process_is_in_the_list() {
        let own = std::process::id();
        let listed = all();
        let process = listed.iter().find(|process| process.pid == own).unwrap();
        assert!(process.resident_bytes > 0);
        assert!(!process.command_line.is_empty());
        assert!(descendants(own).contains(&own));
    }
}
