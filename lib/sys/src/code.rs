//! This process's own code in memory.

use std::io;

/// Unmaps the pages of this process's code, which come back, from the page cache, as they are used. The kernel maps code
/// in runs of 64 KiB around what is used once: a process that has started and waits holds mostly code that it never
/// needs again. For quiet moments: each page that is needed costs a minor fault.
pub fn let_go() -> io::Result<()> {
    for (start, length) in mappings(&std::fs::read_to_string("/proc/self/maps")?) {
        // SAFETY: the range is a mapping of a file that is executable and not writable, so its pages hold what the file
        // holds and nothing else; the next use maps them again.
        let result = unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Start and length of each mapping of code of a file, in what /proc/PID/maps says.
fn mappings(maps: &str) -> Vec<(usize, usize)> {
    let code = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (range, permissions) = (words.next()?, words.next()?);
        let file = words.nth(3)?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        (permissions == "r-xp" && file.starts_with('/')).then_some((start, end.checked_sub(start)?))
    };
    maps.lines().filter_map(code).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_found() {
        let maps = "\
55d0a0000000-55d0a0100000 r--p 00000000 fe:00 131 /usr/bin/imp
55d0a0100000-55d0a0500000 r-xp 00100000 fe:00 131 /usr/bin/imp
55d0a0500000-55d0a0600000 r--p 00500000 fe:00 131 /usr/bin/imp
55d0a0600000-55d0a0610000 rw-p 00600000 fe:00 131 /usr/bin/imp
55d0a1000000-55d0a1021000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000001000 r-xp 00000000 00:00 0
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0 [vdso]
";
        assert_eq!(mappings(maps), [(0x55d0a0100000, 0x400000)]);
    }

    #[test]
    fn a_program_goes_on_without_its_code_in_memory() {
        assert!(!mappings(&std::fs::read_to_string("/proc/self/maps").unwrap()).is_empty());
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap().to_owned();
            line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        };
        // Code that runs brings itself in.
        let _ = format!("{:?}", std::net::TcpListener::bind("127.0.0.1:0"));
        let before = resident();
        let_go().unwrap();
        assert!(resident() < before);
    }
}
