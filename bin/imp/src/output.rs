//! What commands print: tables for people, JSON and names for scripts, complaints on stderr.

use std::io::{self, IsTerminal, Write};

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::exit::own_output;

/// The forms of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Columns for people
    Table,
    /// One JSON document
    Json,
    /// One name in each line
    Name,
}

/// What is listed, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Table,
    Json,
    Names,
    Ids,
}

/// The flags of commands that list things.
#[derive(Debug, Args)]
pub(crate) struct Listing {
    /// Form of the output
    #[arg(short, long, value_enum, default_value = "table", value_name = "FORM")]
    pub(crate) output: Format,
    /// Ids only, whole, one in each line
    #[arg(short, long, conflicts_with = "output")]
    quiet: bool,
    /// Tables without their heading
    #[arg(long)]
    no_headers: bool,
}

/// One thing of a listing.
pub(crate) trait Row: Serialize {
    const HEADINGS: &'static [&'static str];
    fn cells(&self) -> Vec<String>;
    /// What no other thing has.
    fn id(&self) -> String;
    fn name(&self) -> String;
}

impl Listing {
    /// Whether people read it.
    pub(crate) fn is_table(&self) -> bool {
        self.output == Format::Table && !self.quiet
    }

    pub(crate) fn print<R: Row>(&self, rows: &[R]) -> io::Result<()> {
        let form = match (self.quiet, self.output) {
            (true, _) => Form::Ids,
            (false, Format::Table) => Form::Table,
            (false, Format::Json) => Form::Json,
            (false, Format::Name) => Form::Names,
        };
        print(&render(form, rows, if self.no_headers { Headings::Left } else { Headings::Shown }))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Headings {
    Shown,
    Left,
}

fn render<R: Row>(form: Form, rows: &[R], headings: Headings) -> String {
    match form {
        Form::Json => json(&rows),
        Form::Names => rows.iter().map(|row| row.name() + "\n").collect(),
        Form::Ids => rows.iter().map(|row| row.id() + "\n").collect(),
        Form::Table => {
            let mut lines: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
            if headings == Headings::Shown {
                lines.insert(0, R::HEADINGS.iter().map(|&heading| heading.to_owned()).collect());
            }
            table(&lines)
        }
    }
}

/// Columns as wide as their widest cell, two spaces between.
pub(crate) fn table(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines
            .iter()
            .filter_map(|line| line.get(column))
            .map(|cell| printable(cell).chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut row = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            row.push_str(&format!("{:<width$}  ", printable(cell)));
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// Text from images and guests must not steer the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}

pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("what is listed has text for keys") + "\n"
}

/// Writes to stdout; a reader that has gone away is an error like any other, and ends the command.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    own_output(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// Says on stderr what went wrong.
pub(crate) fn complain(text: &str) {
    say(&format!("{} {}", colored(Color::Red, "error:"), plain(text)));
}

/// Errors quote images, registries and guests, line by line.
fn plain(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// Says on stderr what is worth knowing.
pub(crate) fn warn(text: &str) {
    say(&format!("{} {}", colored(Color::Yellow, "warning:"), plain(text)));
}

/// Says something on stderr; nobody to tell if that fails.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Color {
    Red,
    Yellow,
    Green,
}

fn colored(color: Color, text: &str) -> String {
    paint(color, text, &io::stderr())
}

/// Colored for stdout.
pub(crate) fn colored_out(color: Color, text: &str) -> String {
    paint(color, text, &io::stdout())
}

fn paint(color: Color, text: &str, stream: &impl IsTerminal) -> String {
    let forbidden = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if forbidden || !stream.is_terminal() {
        return text.to_owned();
    }
    let code = match color {
        Color::Red => 31,
        Color::Yellow => 33,
        Color::Green => 32,
    };
    format!("\x1b[1;{code}m{text}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_lines_and_steers_no_terminal() {
        assert_eq!(plain("one\n\x1b[2Jtwo\r"), "one\n\u{fffd}[2Jtwo\u{fffd}");
    }

    #[derive(Serialize)]
    struct Thing {
        name: &'static str,
        size: u32,
    }

    impl Row for Thing {
        const HEADINGS: &'static [&'static str] = &["NAME", "SIZE"];
        fn cells(&self) -> Vec<String> {
            vec![self.name.to_owned(), self.size.to_string()]
        }
        fn id(&self) -> String {
            format!("id-{}", self.name)
        }
        fn name(&self) -> String {
            self.name.to_owned()
        }
    }

    const THINGS: [Thing; 2] = [Thing { name: "a", size: 1 }, Thing { name: "longer", size: 22 }];

    #[test]
    fn a_table_has_aligned_columns_and_no_trailing_spaces() {
        assert_eq!(render(Form::Table, &THINGS, Headings::Shown), "NAME    SIZE\na       1\nlonger  22\n");
        assert_eq!(render(Form::Table, &THINGS, Headings::Left), "a       1\nlonger  22\n");
        assert_eq!(render::<Thing>(Form::Table, &[], Headings::Shown), "NAME  SIZE\n");
    }

    #[test]
    fn json_is_one_document_also_when_there_is_nothing() {
        let parsed: serde_json::Value =
            serde_json::from_str(&render(Form::Json, &THINGS, Headings::Shown)).unwrap();
        assert_eq!(parsed[1]["size"], 22);
        assert_eq!(render::<Thing>(Form::Json, &[], Headings::Shown), "[]\n");
    }

    #[test]
    fn names_and_ids_stand_one_in_a_line() {
        assert_eq!(render(Form::Ids, &THINGS, Headings::Shown), "id-a\nid-longer\n");
        assert_eq!(render(Form::Names, &THINGS, Headings::Shown), "a\nlonger\n");
        assert_eq!(render::<Thing>(Form::Names, &[], Headings::Shown), "");
    }

    #[test]
    fn text_from_a_guest_does_not_steer_the_terminal() {
        assert_eq!(table(&[vec!["a\x1b[2Jb\n".into()]]), "a\u{fffd}[2Jb\u{fffd}\n");
    }
}
