//! The one program inside every VM: PID 1, and the agent that PID 1 starts.

use std::process::ExitCode;

use imp_guest_agent::{init, log, main as serve};

fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::run();
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    if init::requested(&words) {
        return ExitCode::SUCCESS;
    }
    match serve(words.into_iter()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error(format_args!("{error}"));
            // Somebody who calls it by hand sees this; the agent's own output goes nowhere.
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("imp: {error}\n"));
            ExitCode::FAILURE
        }
    }
}
