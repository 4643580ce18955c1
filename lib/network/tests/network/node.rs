//! The same tests on the kernel of a node VM, which is a distribution's: modules that load on demand, another version.

use std::time::Duration;

use imp_testkit::node::{Command, NodeVm};

/// Far above what all tests take on one processor that another emulates: three minutes, if that one has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(900);

#[test]
fn all_of_this_holds_on_the_kernel_of_a_node() {
    let node = NodeVm::builder().name("network").share(env!("CARGO_MANIFEST_DIR")).start().unwrap();
    let release = node.check(Command::new("uname").arguments(["-r"])).unwrap().text();
    assert_ne!(release, std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap());
    let tests = std::env::current_exe().unwrap().display().to_string();
    let all = Command::new(tests)
        .arguments(["--skip", "node::", "--test-threads", "2"])
        .environment("RUST_BACKTRACE", "1")
        .directory(env!("CARGO_MANIFEST_DIR"))
        .deadline(PATIENCE);
    let output = node.exec(all).unwrap();
    assert_eq!(output.code(), Some(0), "on {release}{}", output.text());
    assert!(output.text().contains("test result: ok."), "{}", output.text());
}
