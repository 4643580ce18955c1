//! Tests that run in a node: written like any other, and re-executed there where the host cannot run guests itself.

use std::env;
use std::io::{self, Write as _};
use std::num::NonZero;
use std::sync::{Condvar, LazyLock, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use super::{Command, End, Error, NODE_DISK, NodeVm, Piece, kvm};
use crate::machine;

/// Set in the node, where a test runs its own body.
const IN_NODE: &str = "IMP_IN_NODE";
/// Where such tests run: `node` or `host`; without it, a trial tells.
const PLACE: &str = "IMP_LAB";
/// Variables with these beginnings go with the test.
const PASSED_ON: [&str; 3] = ["IMP_", "RUST_", "CARGO_"];

/// Nodes of one program at the same time; each takes up to 2 GiB of memory.
const MOST_NODES: usize = 4;

/// Where guests run with KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Host,
    Node,
}

/// Runs the body of a test where guests run with KVM: here, if they do, or else in a node, in which this test's program
/// is started again with this test alone. Call it first in the test, and everything else in `body`.
///
/// ```no_run
/// # use imp_testkit::node;
/// // #[test]
/// fn firecracker_says_its_version() {
///     node::inside(|| {
///         let path = node::artefacts::firecracker().unwrap();
///         assert!(std::process::Command::new(path).arg("--version").status().unwrap().success());
///     });
/// }
/// ```
///
/// The tests of one program share a few nodes, one for each processor of this machine, and run in each one after another;
/// after a failure the next gets a new one.
pub fn inside(body: impl FnOnce()) {
    inside_within(Duration::from_secs(120), body);
}

/// The same with a deadline of its own, which a body on the host is trusted to keep by itself.
pub fn inside_within(deadline: Duration, body: impl FnOnce()) {
    if is_node() || place() == Place::Host {
        return body();
    }
    let test = thread::current().name().filter(|name| *name != "main").map(str::to_owned);
    let test = test.expect("node::inside is called by a test itself, whose thread has the test's name");
    if let Err(error) = in_node(&test, deadline) {
        panic(&test, &error);
    }
}

#[expect(clippy::panic, reason = "that is how a test fails")]
fn panic(test: &str, error: &Error) -> ! {
    let mut text = match error {
        // What it said was shown as it came.
        Error::Failed { output, .. } => format!("exit code {:?}, its output is above", output.code()),
        error => error.to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!("\n  because: {error}"));
        cause = error.source();
    }
    panic!("{test} failed in its node: {text}");
}

/// Whether this process runs in a node, where it may change what it likes.
pub(crate) fn is_node() -> bool {
    env::var_os(IN_NODE).is_some()
}

/// Decided once per process, and said aloud.
pub fn place() -> Place {
    static DECIDED: OnceLock<Place> = OnceLock::new();
    *DECIDED.get_or_init(|| {
        let (place, why) = match env::var(PLACE).as_deref() {
            Ok("node") => (Place::Node, "as IMP_LAB says"),
            Ok("host") => (Place::Host, "as IMP_LAB says"),
            _ if kvm::works() => (Place::Host, "because KVM runs guests here"),
            _ => (Place::Node, "because KVM runs no guests here"),
        };
        let text = match place {
            Place::Host => format!("lab: these tests run on this machine itself, {why}\n"),
            Place::Node => format!("lab: these tests run in a node VM, {why}\n"),
        };
        // Not by a macro, whose output the test harness would keep to itself.
        let _ = io::stderr().write_all(text.as_bytes());
        place
    })
}

fn in_node(test: &str, deadline: Duration) -> Result<(), Error> {
    static PLACES: LazyLock<Places> = LazyLock::new(Places::new);
    let mut place = PLACES.wait_for_one();
    let node = match place.node.take() {
        Some(node) => node,
        None => start()?,
    };
    let result = run(&node, test, deadline);
    match &result {
        Ok(()) => place.node = Some(node),
        Err(_) => eprintln!("{}", node.save_logs()),
    }
    result
}

/// Places for nodes that run at the same time. Each is empty, or has a node that no test uses now.
struct Places {
    free: Mutex<Vec<Option<NodeVm>>>,
    freed: Condvar,
}

/// A place that one test has; it goes back when this is dropped.
struct Taken<'a> {
    places: &'a Places,
    node: Option<NodeVm>,
}

impl Places {
    fn new() -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let free = (0..processors.min(MOST_NODES)).map(|_| None).collect();
        Self { free: Mutex::new(free), freed: Condvar::new() }
    }

    fn wait_for_one(&self) -> Taken<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.freed.wait_while(free, |free| free.is_empty());
        let mut free = wait.unwrap_or_else(PoisonError::into_inner);
        // A node that is there rather than a new one.
        let at = free.iter().position(Option::is_some).unwrap_or(0);
        Taken { places: self, node: free.swap_remove(at) }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.places.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.node.take());
        self.places.freed.notify_one();
    }
}

/// For a program that is no test: runs it again in a node, with its arguments and what it says passed through, and returns
/// how it ended there. Nothing: this is a place where guests run with KVM.
pub fn again_inside(memory_mib: u32, deadline: Duration) -> Result<Option<End>, Error> {
    if is_node() || place() == Place::Host {
        return Ok(None);
    }
    let node = NodeVm::builder().memory_mib(memory_mib).start()?;
    let program = env::current_exe().unwrap_or_default().display().to_string();
    let command = Command::new(program).arguments(env::args().skip(1)).environment("TMPDIR", NODE_DISK);
    let mut process = node.spawn(as_here(command.deadline(deadline))?)?;
    while let Some(piece) = process.next_piece()? {
        let passed_on = match piece {
            Piece::Output(bytes) => io::stdout().write_all(&bytes).and_then(|()| io::stdout().flush()),
            Piece::Errors(bytes) => io::stderr().write_all(&bytes),
        };
        // Nobody listens: it runs to its end all the same.
        let _ = passed_on;
    }
    Ok(process.wait()?.end)
}

fn start() -> Result<NodeVm, Error> {
    let mut node = NodeVm::builder();
    // Files beside a test's source, which it names by this.
    if let Some(package) = env::var_os("CARGO_MANIFEST_DIR") {
        node = node.share(package);
    }
    node.start()
}

fn run(node: &NodeVm, test: &str, deadline: Duration) -> Result<(), Error> {
    let program = env::current_exe().unwrap_or_default().display().to_string();
    let command = Command::new(program)
        .arguments([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
        .deadline(deadline);
    let mut command = as_here(command)?;
    if let Ok(package) = env::var("CARGO_MANIFEST_DIR") {
        command = command.directory(package);
    }
    let text = command.to_string();
    let mut process = node.spawn(command)?;
    while let Some(piece) = process.next_piece()? {
        // By the macros, so that the harness shows it with this test, and when it fails.
        match piece {
            Piece::Output(bytes) => print!("{}", String::from_utf8_lossy(&bytes)),
            Piece::Errors(bytes) => eprint!("{}", String::from_utf8_lossy(&bytes)),
        }
    }
    let output = process.wait()?;
    // A program without this test, or with another one, ends well, too.
    if output.code() == Some(0) && ran_one(&output.text()) {
        return Ok(());
    }
    Err(Error::Failed { command: text, output: Box::new(output) })
}

/// With the variables of this process that tell where things are.
fn as_here(command: Command) -> Result<Command, Error> {
    let mut command = command.environment(IN_NODE, "1");
    for (name, value) in env::vars().filter(|(name, _)| PASSED_ON.iter().any(|start| name.starts_with(start)))
    {
        command = command.environment(&name, &value);
    }
    // The same cache, so that fixtures made on the host are found.
    if let Some(parent) = machine::cache()?.parent() {
        command = command.environment("XDG_CACHE_HOME", &parent.display().to_string());
    }
    Ok(command)
}

/// Whether the harness says that one test ran and passed.
fn ran_one(output: &str) -> bool {
    output.lines().any(|line| line.starts_with("test result: ok. 1 passed; 0 failed;"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_in_which_no_test_ran_has_not_passed() {
        assert!(ran_one(
            "\nrunning 1 test\ntest a ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0\n"
        ));
        assert!(!ran_one(
            "\nrunning 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured;\n"
        ));
        assert!(!ran_one(""));
    }
}
