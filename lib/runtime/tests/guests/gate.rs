//! Holds a process at the file that it is about to open: what a test does then happens exactly between two of its steps.
//! The programs are the official ones, unchanged; it is the kernel that asks before it lets them go on. It asks for regular
//! files only, not for devices and pipes.

use std::ffi::OsString;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use imp_sys::fanotify::{Group, Opening, Purpose};
use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::engine::host::LONG;

/// A program, and the file at which it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Whoever is about to become this program.
    Becomes(&'static str),
    Opens {
        program: &'static str,
        file: &'static str,
    },
}

struct Armed {
    step: Step,
    caught: oneshot::Sender<Held>,
}

/// A process that does not go on until this is dropped. It can be killed.
pub(crate) struct Held {
    pub pid: u32,
    opening: Opening,
    group: Arc<Group>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.group.allow(&self.opening).unwrap();
    }
}

/// Watches one file system until it is dropped.
pub(crate) struct Gate {
    armed: Arc<Mutex<Option<Armed>>>,
    thread: Option<JoinHandle<()>>,
    /// Closed, it ends the thread.
    open: Option<std::io::PipeWriter>,
}

impl Gate {
    /// Of the file system that is mounted there; every file that the programs of a step open must be on it.
    pub(crate) fn of(mounted: &Path) -> Self {
        let group = Arc::new(Group::of_file_system(mounted).unwrap());
        let (closed, open) = std::io::pipe().unwrap();
        let armed = Arc::new(Mutex::new(None));
        let to_catch = Arc::clone(&armed);
        let thread = std::thread::spawn(move || {
            loop {
                let mut ready =
                    [PollFd::new(&*group, PollFlags::IN), PollFd::new(&closed, PollFlags::empty())];
                poll(&mut ready, None).unwrap();
                if !ready[1].revents().is_empty() {
                    return;
                }
                for opening in group.openings().unwrap() {
                    answer(&group, opening, &to_catch);
                }
            }
        });
        Self { armed, thread: Some(thread), open: Some(open) }
    }

    /// Catches the first process that comes to this step from now on.
    pub(crate) fn arm(&self, step: Step) -> Catch {
        let (caught, catch) = oneshot::channel();
        *self.armed.lock().unwrap() = Some(Armed { step, caught });
        Catch { step, catch }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        drop(self.open.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the gate did not hold");
    }
}

pub(crate) struct Catch {
    step: Step,
    catch: oneshot::Receiver<Held>,
}

impl Catch {
    pub(crate) async fn held(self) -> Held {
        match timeout(LONG, self.catch).await {
            Ok(held) => held.unwrap(),
            Err(_) => panic!("nobody came to {:?} in time", self.step),
        }
    }
}

fn answer(group: &Arc<Group>, opening: Opening, armed: &Mutex<Option<Armed>>) {
    let mut armed = armed.lock().unwrap();
    match armed.take_if(|armed| comes_to(armed.step, &opening)) {
        Some(armed) => {
            let held = Held { pid: opening.pid, opening, group: Arc::clone(group) };
            // Nobody waits for it any more: it goes on.
            drop(armed.caught.send(held));
        }
        None => group.allow(&opening).unwrap(),
    }
}

fn comes_to(step: Step, opening: &Opening) -> bool {
    let opened = fs::read_link(format!("/proc/self/fd/{}", opening.file.as_raw_fd())).unwrap();
    let opened = opened.file_name().map(OsString::from).unwrap_or_default();
    match step {
        Step::Becomes(program) => opening.purpose == Purpose::Execute && opened == program,
        Step::Opens { program, file } => {
            let words = fs::read(format!("/proc/{}/cmdline", opening.pid)).unwrap_or_default();
            let first = words.split(|byte| *byte == 0).next().unwrap_or_default();
            let called = String::from_utf8_lossy(first);
            opening.purpose == Purpose::Open
                && opened == file
                && Path::new(called.as_ref()).file_name().is_some_and(|name| name == program)
        }
    }
}
