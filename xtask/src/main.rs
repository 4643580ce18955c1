//! The project's own chores: `kernel` makes what a guest boots from, `lab` what the tests' node VMs need besides, `tidy`
//! checks the design's invariants.

mod kernel;
mod lab;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

use kernel::Machine;

const USAGE: &str = "\
usage: cargo xtask kernel <Debian kernel package, or the folder it was unpacked to> <folder of kernel bundles>
       cargo xtask lab kernel <the same package or folder> <lab folder>
       cargo xtask lab firecracker <lab folder>
       cargo xtask tidy";

fn main() -> anyhow::Result<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["kernel", package, bundles] => {
            println!("{}", kernel::bundle(Path::new(package), Path::new(bundles), Machine::Guest)?.display());
            Ok(ExitCode::SUCCESS)
        }
        ["lab", "kernel", package, lab] => {
            println!("{}", lab::kernel(Path::new(package), Path::new(lab))?.display());
            Ok(ExitCode::SUCCESS)
        }
        ["lab", "firecracker", lab] => {
            println!("{}", lab::firecracker(Path::new(lab))?.display());
            Ok(ExitCode::SUCCESS)
        }
        ["tidy"] => tidy::run(&workspace_root()),
        _ => {
            eprintln!("{USAGE}");
            Ok(ExitCode::from(2))
        }
    }
}

fn workspace_root() -> std::path::PathBuf {
    // Asked for when it runs: two clones that share a target directory may share this program, too.
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR");
    let xtask = xtask.as_deref().map_or(Path::new(env!("CARGO_MANIFEST_DIR")), Path::new);
    xtask.parent().unwrap_or(xtask).to_owned()
}
