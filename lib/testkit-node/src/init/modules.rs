//! The kernel's modules: a few before anything else, the others when the kernel or a program asks for them.

use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use rustix::io::Errno;
use rustix::mount::mount_bind;

/// Paths of the modules to load at once, in order.
const FIRST: &str = "/modules.list";
/// One line per module: those to load for it, in order, joined by commas; then patterns of other names for it.
pub(crate) const INDEX: &str = "/modules.index";
const FOLDER: &str = "/modules";
/// Who the kernel runs for a module that it lacks: this program, in the initramfs, where kernel threads still live.
const LOADER: &str = "/proc/sys/kernel/modprobe";

pub(super) fn load_first() -> anyhow::Result<()> {
    for path in fs::read_to_string(FIRST).with_context(|| format!("reading {FIRST}"))?.lines() {
        if let Err(error) = load(path) {
            // The processor may lack what the module drives; what needs it will say so.
            super::say(&format!("{error:#}"));
        }
    }
    fs::write(LOADER, "/init").with_context(|| format!("writing {LOADER}"))
}

/// Modules stay reachable in the root to come, also for programs that run the kernel's loader themselves.
pub(super) fn keep_for_later(root: &str) -> anyhow::Result<()> {
    let folder = format!("{root}{FOLDER}");
    fs::create_dir_all(&folder)?;
    mount_bind(FOLDER, &folder).context("keeping the modules")?;
    fs::copy(INDEX, format!("{root}{INDEX}"))?;
    fs::copy("/init", format!("{root}/init"))?;
    Ok(())
}

/// What `modprobe` does with these arguments; options mean nothing here.
pub(crate) fn load_asked_for(arguments: &[&str]) -> ExitCode {
    let index = fs::read_to_string(INDEX).unwrap_or_default();
    let mut code = ExitCode::SUCCESS;
    for name in arguments.iter().filter(|argument| !argument.starts_with('-')) {
        for module in needed(&index, &name.replace('-', "_")) {
            if let Err(error) = load(&format!("{FOLDER}/{module}.ko")) {
                super::say(&format!("{error:#}"));
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

fn load(path: &str) -> anyhow::Result<()> {
    let file = File::open(Path::new(path)).with_context(|| format!("opening {path}"))?;
    match rustix::system::finit_module(&file, c"", 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("loading {path}")),
    }
}

/// All modules of that name or alias, each after those that it needs.
fn needed<'a>(index: &'a str, name: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for line in index.lines() {
        let mut words = line.split(' ');
        let order = words.next().unwrap_or_default().split(',');
        if order.clone().next_back() == Some(name) || words.any(|pattern| matches(pattern, name)) {
            found.extend(order);
        }
    }
    found
}

/// `*` stands for any characters; modules use nothing else for what is asked for here.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
        last = Some(part);
    }
    match last {
        None => rest.is_empty(),
        Some(part) => name.ends_with(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: &str = "loop block_major_7_* devname:loop_control\n\
        nfnetlink,nf_tables nfnetlink_subsys_10\n\
        nfnetlink,nf_tables,nft_ct nft_expr_ct nft_expr_notrack\n";

    #[test]
    fn a_module_is_found_by_its_name_and_by_what_the_kernel_calls_it() {
        assert_eq!(needed(INDEX, "nft_ct"), ["nfnetlink", "nf_tables", "nft_ct"]);
        assert_eq!(needed(INDEX, "nfnetlink_subsys_10"), ["nfnetlink", "nf_tables"]);
        assert_eq!(needed(INDEX, "block_major_7_0"), ["loop"]);
        assert!(needed(INDEX, "nft_expr").is_empty());
        assert!(needed(INDEX, "nfnetlink").is_empty(), "it is no module of its own line");
    }

    #[test]
    fn a_star_stands_for_anything() {
        assert!(matches("a*", "a") && matches("a*c", "abc") && matches("*", "") && matches("a*b*c", "a1b2c"));
        assert!(!matches("a*c", "ab") && !matches("a", "ab") && !matches("b*", "ab"));
    }
}
