//! The one program of the image without anything else: shows how it was started and ends as it is told.
//!
//! `show [--exit CODE] [--cat] [WORD…]`

use std::io::{self, Write as _};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut code = 0;
    let mut cat = false;
    let mut words = std::env::args().skip(1);
    let mut out = io::stdout().lock();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--exit" => code = words.next().and_then(|code| code.parse().ok()).unwrap_or(2),
            "--cat" => cat = true,
            word => drop(writeln!(out, "argument {word}")),
        }
    }
    for (name, value) in std::env::vars() {
        drop(writeln!(out, "variable {name}={value}"));
    }
    if cat {
        drop(io::copy(&mut io::stdin(), &mut out));
    }
    drop(out.flush());
    ExitCode::from(code)
}
