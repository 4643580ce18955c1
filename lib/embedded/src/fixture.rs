//! An engine without a VMM, for the tests of what stands on it: no VM runs there.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use imp_runtime::spec::BridgeSettings;
use imp_runtime::{Config, Digest, DriverChoice, Runtime};
use tokio::sync::watch;

use crate::layout::Layout;
use crate::under_way::UnderWay;

/// Says what a QEMU says, and runs nothing.
const QEMU: &str = "#!/bin/sh
case \"$1\" in
--version) echo QEMU emulator version 9.9.9 ;;
-machine) echo microvm x ;;
*) exit 33 ;;
esac
";

pub(crate) struct Engine {
    pub(crate) layout: Layout,
    pub(crate) runtime: Runtime,
    pub(crate) under_way: UnderWay,
}

impl Engine {
    pub(crate) async fn open(folder: &Path) -> Self {
        let layout = Layout { data: folder.join("data"), runtime: folder.join("run") };
        let runtime = Runtime::open(Config {
            data: layout.data.clone(),
            runtime: layout.runtime.clone(),
            guest_agent: folder.join("agent"),
            driver: DriverChoice::Qemu,
            firecracker: None,
            qemu: Some(qemu(folder)),
            bridge: BridgeSettings::default(),
        });
        let runtime = runtime.await.unwrap();
        Self { layout, runtime, under_way: UnderWay::new(Arc::new(watch::channel(false).0)) }
    }

    /// A snapshot that can be kept; no VM can be made of it.
    pub(crate) fn snapshot(&self) -> Digest {
        let snapshot = Digest::of(b"snapshot");
        std::fs::create_dir_all(self.runtime.snapshot_directory(&snapshot)).unwrap();
        snapshot
    }
}

/// Written by another process: while this one has a program open for writing, nobody can start it.
fn qemu(folder: &Path) -> PathBuf {
    let path = folder.join("qemu");
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(&path).stdin(Stdio::piped());
    let mut install = install.spawn().unwrap();
    install.stdin.take().unwrap().write_all(QEMU.as_bytes()).unwrap();
    assert!(install.wait().unwrap().success());
    path
}
