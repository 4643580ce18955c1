//! What the kernel's log says of a process.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;

/// The kernel gives out no longer record.
const LONGEST: usize = 8 << 10;

/// Whether the kernel says that it has killed this process for lack of memory.
pub(super) fn says_out_of_memory(pid: u32) -> bool {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let Ok(mut log) = File::options().read(true).custom_flags(flags).open("/dev/kmsg") else { return false };
    let mut record = [0; LONGEST];
    loop {
        match log.read(&mut record) {
            Ok(0) => return false,
            Ok(length)
                if is_kill(&String::from_utf8_lossy(record.get(..length).unwrap_or_default()), pid) =>
            {
                return true;
            }
            Ok(_) => {}
            // A record that was overwritten before it was read: the next read gives the oldest that is left.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
            Err(_) => return false,
        }
    }
}

/// The record is "priority,number,time,flags;message". Processes can write into the log, but not with the kernel's
/// facility, which is 0: such a priority is below 8.
fn is_kill(record: &str, pid: u32) -> bool {
    let Some((head, message)) = record.split_once(';') else { return false };
    let of_kernel =
        head.split(',').next().and_then(|priority| priority.parse::<u32>().ok()).is_some_and(|p| p < 8);
    let killed = message
        .split_once("ut of memory: Killed process ")
        .and_then(|(_, rest)| rest.split(' ').next())
        .and_then(|number| number.parse::<u32>().ok());
    of_kernel && killed == Some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernel_says_which_process_it_has_killed_for_lack_of_memory() {
        let everywhere =
            "3,1071,5140900,-;Out of memory: Killed process 42 (tail) total-vm:1kB, anon-rss:1kB\n";
        let in_a_group =
            "3,1071,5140900,-;Memory cgroup out of memory: Killed process 42 (tail) total-vm:1kB\n";
        let by_a_process = "12,1071,5140900,-;Out of memory: Killed process 42 (tail) total-vm:1kB\n";
        assert!(is_kill(everywhere, 42));
        assert!(is_kill(in_a_group, 42));
        assert!(!is_kill(everywhere, 4));
        assert!(!is_kill(by_a_process, 42));
        assert!(!is_kill("6,1,2,-;eth0: link up\n", 42));
        assert!(!is_kill("Out of memory: Killed process 42 (tail)", 42));
    }
}
