//! `imp completions`

use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};

use crate::args::Arguments;
use crate::exit::Outcome;
use crate::output;

/// Print completions for a shell
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell; for bash: `imp completions bash > /usr/share/bash-completion/completions/imp`
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> Outcome {
        let mut text = Vec::new();
        generate(self.shell, &mut Arguments::command(), "imp", &mut text);
        output::print(&String::from_utf8_lossy(&text))?;
        Ok(0)
    }
}
