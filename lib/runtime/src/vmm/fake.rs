//! Programs in the place of a VMM, for tests.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Written by another process: as long as this one has a program open for writing nobody can start it, and a child that
/// another test has just made has all that is open here.
pub(crate) fn program(directory: &Path, name: &str, script: &str) -> PathBuf {
    let path = directory.join(name);
    let install =
        Command::new("install").args(["-m", "755", "/dev/stdin"]).arg(&path).stdin(Stdio::piped()).spawn();
    let mut install = install.unwrap();
    install.stdin.take().unwrap().write_all(format!("#!/bin/sh\n{script}\n").as_bytes()).unwrap();
    assert!(install.wait().unwrap().success());
    path
}
