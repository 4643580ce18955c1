//! `imp-node`: PID 1 of a node VM of the tests, its module loader, and on the host the guard of such a VM; in a guest
//! that means harm, the other end of its channel.

mod channel;
mod init;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        // Only a node has the index; its guard on the host is a PID 1, too.
        ["/init", ..] if std::process::id() == 1 && Path::new(init::INDEX).exists() => init::run(),
        ["/init", names @ ..] => init::load_asked_for(names),
        [_, "guard", folder] => match imp_testkit_node::guard::run(Path::new(folder)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        [_, "channel", port, program, arguments @ ..] => channel::serve(port, program, arguments),
        [_, init::SERVE] => init::serve(),
        [_, init::ENTER, cgroup, program, arguments @ ..] => init::enter(cgroup, program, arguments),
        _ => {
            eprintln!("imp-node is started by the tests' node VMs, not by hand: see docs/testing-nodes.md");
            ExitCode::from(2)
        }
    }
}
