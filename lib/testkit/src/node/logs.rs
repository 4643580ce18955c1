//! Saves a node's console and logs, because its folder goes with it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use imp_testkit_node::guard::LOGS;

use super::error::Logs;

/// Names the folder below which logs are saved; the system's temporary folder without it.
const FOLDER: &str = "IMP_TEST_LOGS";
/// Bytes of each log that an error shows.
const SHOWN: usize = 3000;

/// Copies the logs out of a node's folder. A log that cannot be read is left out, and those of a node that has gone are
/// what they were when they were saved before.
pub(super) fn save(node: &Path, to: &Path) -> Logs {
    let saved = copy(node, to);
    let mut console = String::new();
    for log in LOGS {
        let text = fs::read(to.join(log)).unwrap_or_default();
        let text = text.get(text.len().saturating_sub(SHOWN)..).unwrap_or_default();
        let text = String::from_utf8_lossy(text);
        if !text.trim().is_empty() {
            console.push_str(&format!("[{log}] {}\n", text.trim_end()));
        }
    }
    Logs { folder: saved, console }
}

/// A folder that no other node saves to.
pub(super) fn place(name: &str) -> PathBuf {
    static SAVED: AtomicU32 = AtomicU32::new(0);
    let folder = env::var_os(FOLDER).map_or_else(|| env::temp_dir().join("imp-node-logs"), PathBuf::from);
    let number = SAVED.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{name}-{}-{number}", std::process::id()))
}

fn copy(node: &Path, to: &Path) -> Option<PathBuf> {
    fs::create_dir_all(to).ok()?;
    for log in LOGS {
        // One that the node did not come to write is not there.
        let _ = fs::copy(node.join(log), to.join(log));
    }
    Some(to.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_console_is_shown_and_all_of_it_is_kept() {
        let node = tempfile::tempdir().unwrap();
        let console = format!("first\n{}last\n", "x\n".repeat(SHOWN));
        fs::write(node.path().join("console.log"), &console).unwrap();
        let logs = save(node.path(), &place("a-test"));
        let folder = logs.folder.as_ref().unwrap();
        assert_eq!(fs::read_to_string(folder.join("console.log")).unwrap(), console);
        let text = logs.to_string();
        assert!(text.contains("last") && !text.contains("first"), "{text}");
        assert!(text.contains(&folder.display().to_string()), "{text}");
        fs::remove_dir_all(folder).unwrap();
    }
}
