//! A process that is killed at any step of a pull, an import or a build leaves a store that works.
//!
//! The process is this test binary, started again for one ignored test. It stops at each event of its progress until it
//! is told to go on, so that it can be killed exactly there.

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use imp_storage::image::reference::Reference;
use imp_storage::progress::Event;
use imp_storage::store::{PullPolicy, Store};
use imp_testkit::machine::program;
use imp_testkit::registry::Reaction;

use crate::fixture::{Fixture, Recorder, blob_requests, leftovers, options, reference};

const EVENT: &str = "event:";

/// A process that pulls and builds, one event at a time.
struct Worker {
    process: Child,
    go_on: ChildStdin,
    events: BufReader<ChildStdout>,
}

impl Worker {
    fn start(root: &Path, name: &Reference) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "crash::pull_and_build_step_by_step", "--ignored", "--nocapture"])
            .env("STORE_ROOT", root)
            .env("STORE_IMAGE", name.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (go_on, events) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, go_on, events: BufReader::new(events) }
    }

    /// The next event; None when the work is done.
    fn event(&mut self) -> Option<String> {
        let mut line = String::new();
        while self.events.read_line(&mut line).unwrap() > 0 {
            if let Some((_, event)) = line.split_once(EVENT) {
                return Some(event.trim().to_owned());
            }
            line.clear();
        }
        None
    }

    fn go_on(&mut self) {
        self.go_on.write_all(b"\n").unwrap();
    }

    fn finish(mut self) -> bool {
        while self.event().is_some() {
            self.go_on();
        }
        self.process.wait().unwrap().success()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "the process that the tests of this file start"]
fn pull_and_build_step_by_step() {
    let stop = |event: Event| {
        let name = format!("{event:?}");
        let mut out = std::io::stdout().lock();
        writeln!(out, "{EVENT}{}", name.split([' ', '{']).next().unwrap()).unwrap();
        out.flush().unwrap();
        assert!(std::io::stdin().lock().read_line(&mut String::new()).unwrap() > 0);
    };
    let name: Reference = env::var("STORE_IMAGE").unwrap().parse().unwrap();
    let store =
        Store::open(PathBuf::from(env::var_os("STORE_ROOT").unwrap()), options(&[name.domain()])).unwrap();
    let image = store.pull(&name, PullPolicy::Missing, &stop).unwrap();
    store.base_disk(&image, &[], &stop).unwrap();
}

#[test]
fn a_kill_at_any_step_of_pull_and_build_leaves_a_store_that_works() {
    let fixture = Fixture::new();
    let host = fixture.registry.address();
    let name = reference(host, "app:1");
    for step in 0.. {
        let root = fixture.folder.path().join(format!("store-{step}"));
        let mut worker = Worker::start(&root, &name);
        let mut last = None;
        for number in 0..=step {
            last = worker.event();
            if number < step && last.is_some() {
                worker.go_on();
            }
        }
        let Some(last) = last else {
            assert!(step > 10, "the worker has more steps than {step}");
            return;
        };
        drop(worker);
        let store = Store::open(&root, options(&[host])).unwrap();
        assert_eq!(leftovers(&root), Vec::<PathBuf>::new(), "after a kill at step {step}, {last}");
        let image = store.pull(&name, PullPolicy::Missing, &()).unwrap();
        let disk = store.base_disk(&image, &[], &()).unwrap();
        let checked = Command::new(program("e2fsck").unwrap()).arg("-fn").arg(&disk.path).output().unwrap();
        assert!(checked.status.success(), "after a kill at step {step}, {last}");
    }
}

#[test]
fn an_open_leaves_the_files_of_living_processes() {
    let fixture = Fixture::new();
    let host = fixture.registry.address();
    let mut worker = Worker::start(&fixture.root(), &reference(host, "app:1"));
    while worker.event().unwrap() != "Transferred" {
        worker.go_on();
    }
    let before = leftovers(&fixture.root());
    assert!(before.len() >= 2, "a blob and a lease: {before:?}");
    drop(fixture.store(&[host]));
    assert_eq!(leftovers(&fixture.root()), before);
    worker.go_on();
    assert!(worker.finish());
    assert_eq!(leftovers(&fixture.root()), Vec::<PathBuf>::new());
}

#[test]
fn two_processes_that_pull_one_image_download_and_build_it_once() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|_| Reaction::Forward);
    let name = reference(proxy.address(), "app:1");
    let mut first = Worker::start(&fixture.root(), &name);
    while first.event().unwrap() != "Transferred" {
        first.go_on();
    }
    let recorder = Recorder::default();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            let store = fixture.store(&[proxy.address()]);
            let image = store.pull(&name, PullPolicy::Missing, &recorder).unwrap();
            store.base_disk(&image, &[], &recorder).unwrap();
        });
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while recorder.count(|event| matches!(event, Event::Waiting { .. })) == 0 {
            assert!(std::time::Instant::now() < deadline && !second.is_finished(), "the second never waited");
            std::thread::yield_now();
        }
        first.go_on();
        assert!(first.finish());
    });
    let requests = blob_requests(&proxy);
    let mut once = requests.clone();
    once.dedup();
    assert_eq!((requests.len(), requests), (3, once));
}
