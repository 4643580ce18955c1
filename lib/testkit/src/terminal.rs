//! Commands at a terminal of their own, for what they do only there.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use crate::machine::{self, Error};

/// The same command at a new terminal: what is written to its stdin is typed, what it writes to stdout is the screen.
/// The exit status is the command's.
pub fn command(command: &Command) -> Result<Command, Error> {
    let mut words = quoted(command.get_program());
    for argument in command.get_args() {
        words.push(' ');
        words.push_str(&quoted(argument));
    }
    let mut at_terminal = Command::new(machine::program("script")?);
    at_terminal.args(["--quiet", "--return", "--flush", "--command", &words, "/dev/null"]);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => at_terminal.env(name, value),
            None => at_terminal.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        at_terminal.current_dir(directory);
    }
    at_terminal.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(at_terminal)
}

/// One word of a shell.
fn quoted(word: &OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_finds_itself_at_a_terminal_and_its_status_comes_back() {
        let mut plain = Command::new("sh");
        plain.args(["-c", "test -t 0 && test -t 1 && echo \"it's $0\"; exit 3", "a 'b'"]);
        let output = command(&plain).unwrap().stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), "it's a 'b'");
    }
}
