//! Running programs and seeing what they used.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

/// Runs a program to its end without output.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} ended with {}:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// A field of `/proc/PID/status` in bytes; `None` when the process has ended.
pub(crate) fn memory(pid: u32, field: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_is_an_error_with_what_it_said() {
        let error = run(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("why") && error.contains('3'), "{error}");
    }

    #[test]
    fn the_memory_of_a_running_process_is_known() {
        assert!(memory(std::process::id(), "VmRSS:").unwrap() > 0);
        assert!(memory(u32::MAX, "VmRSS:").is_none());
    }
}
