//! Sockets that lie where those of a VM will be when it starts: of an earlier run, or of anybody.

use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use super::driver::on_driver;
use super::host::{Host, exec, running, start};

/// Sockets below a directory.
fn sockets(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            found.extend(sockets(&entry.path()));
        } else if kind.is_socket() {
            found.push(entry.path());
        }
    }
    found
}

#[test]
fn sockets_in_the_place_of_a_vms_own_are_removed_and_nobody_talks_to_who_listens_there() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let first = start(&runtime, host.spec("first", &["sleep", "1000"])).await;
        running(&runtime, &first).await;
        let id = runtime.create(host.spec("vm", &["sleep", "1000"])).await.unwrap();
        // As those of the first are called.
        let mut listeners = Vec::new();
        for directory in [host.path().join("run"), host.data().join("vms")] {
            for socket in sockets(&directory) {
                let own = socket.to_str().unwrap().replace(first.as_str(), id.as_str());
                if own == socket.to_str().unwrap() {
                    continue;
                }
                std::fs::create_dir_all(Path::new(&own).parent().unwrap()).unwrap();
                let listener = UnixListener::bind(&own).unwrap();
                listener.set_nonblocking(true).unwrap();
                listeners.push((own, listener));
            }
        }
        assert!(!listeners.is_empty(), "a VM has no sockets");
        runtime.start(&id).await.unwrap();
        running(&runtime, &id).await;
        assert_eq!(exec(&runtime, &id, "echo here").await, ("here\n".into(), 0));
        for (path, listener) in &listeners {
            assert!(listener.accept().is_err(), "somebody came to {path}");
        }
        drop(listeners);
        for id in [&first, &id] {
            runtime.kill(id).await.unwrap();
        }
        host.end(runtime).await;
    });
}
