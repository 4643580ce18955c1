//! The command line of Imp: microVMs from OCI images, as easy as containers.

mod args;
mod commands;
mod context;
mod exit;
mod output;
mod progress;
mod session;
mod settings;
mod terminal;
mod value;

use std::process::ExitCode;

use clap::Parser;

use crate::args::Arguments;
use crate::commands::owner::serve::Serve;
use crate::exit::{Failure, report};

fn main() -> ExitCode {
    if only_the_version_is_asked_for() {
        // Asked for by scripts, often: without building the whole command line first.
        return report(
            output::print(&format!("imp {}\n", env!("CARGO_PKG_VERSION"))).map(|()| 0).map_err(Failure::from),
        );
    }
    if let Some(owner) = Serve::parse(std::env::args_os().skip(1)) {
        return report(owner.run());
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return exit::usage(error),
    };
    let context = match context::Context::new(&arguments.global) {
        Ok(context) => context,
        Err(error) => return report(Err(Failure::of(arguments.command.own_failure(), error))),
    };
    report(arguments.command.run(&context))
}

fn only_the_version_is_asked_for() -> bool {
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next();
    arguments.next().is_none() && first.is_some_and(|first| first == "--version" || first == "-V")
}
