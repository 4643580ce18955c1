//! `imp logs`

use std::io::{Write, stderr, stdout};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use clap::Args;
use imp_embedded::client::{Follow, LogEntry, LogQuery, LogSource, LogStream};

use crate::context::Context;
use crate::exit::{Outcome, own_output};
use crate::value::{self, show_time};

/// Print what a VM's program has written
///
/// The last few MiB are kept. The program's stdout goes to stdout, its stderr to stderr.
#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// Name, id, or the beginning of an id
    vm: String,
    /// Go on until the VM has stopped
    #[arg(short, long)]
    follow: bool,
    /// Only the last so many lines, or all
    #[arg(short = 'n', long, value_name = "LINES", allow_hyphen_values = true, default_value = "all")]
    tail: Lines,
    /// Only from this time on: 2025-01-31T12:00:00Z or 2025-01-31 (UTC without a zone), seconds since 1970, or how long
    /// ago, as in 10m
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    since: Option<String>,
    /// Put the time before each line
    #[arg(short, long)]
    timestamps: bool,
    /// The last lines of the machine's console instead
    #[arg(long, conflicts_with_all = ["follow", "since", "timestamps"])]
    console: bool,
}

/// How much of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lines {
    All,
    Last(u64),
}

#[derive(Debug, thiserror::Error)]
#[error("write a number of lines, or all")]
struct NotLines;

impl FromStr for Lines {
    type Err = NotLines;

    fn from_str(text: &str) -> Result<Self, NotLines> {
        if text == "all" { Ok(Self::All) } else { text.parse().map(Self::Last).map_err(|_| NotLines) }
    }
}

impl Logs {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let since = self.since.as_deref().map(|since| value::time(since, SystemTime::now())).transpose()?;
        let mut query = LogQuery {
            follow: if self.follow { Follow::UntilStopped } else { Follow::No },
            tail: match self.tail {
                Lines::All => None,
                Lines::Last(lines) => Some(lines),
            },
            since,
            source: if self.console { LogSource::Console } else { LogSource::Main },
        };
        context.block_on(async {
            let mut logs = context.owner().await?.logs(&self.vm, query.clone()).await?;
            let mut printer = Printer { stamps: self.timestamps, within_line: [false; 2] };
            loop {
                match logs.next().await {
                    Ok(Some(entry)) => {
                        printer.print(&entry)?;
                        // Should the owner change, the next one begins behind what was printed.
                        query.since = entry.at.checked_add(Duration::from_nanos(1));
                        query.tail = None;
                    }
                    Ok(None) => return Ok(0),
                    Err(error) if self.follow && error.is_lost() => {
                        logs = context.owner().await?.logs(&self.vm, query.clone()).await?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        })?
    }
}

struct Printer {
    stamps: bool,
    /// Whether the last piece of stdout, and of stderr, ended within a line.
    within_line: [bool; 2],
}

impl Printer {
    fn print(&mut self, entry: &LogEntry) -> std::io::Result<()> {
        let [out, err] = &mut self.within_line;
        own_output(match entry.stream {
            LogStream::Stdout | LogStream::Console => write(&mut stdout().lock(), entry, self.stamps, out),
            LogStream::Stderr => write(&mut stderr().lock(), entry, self.stamps, err),
        })
    }
}

fn write(
    stream: &mut impl Write,
    entry: &LogEntry,
    stamps: bool,
    within_line: &mut bool,
) -> std::io::Result<()> {
    if !stamps {
        stream.write_all(&entry.data)?;
        return stream.flush();
    }
    for line in entry.data.split_inclusive(|byte| *byte == b'\n') {
        if !*within_line {
            write!(stream, "{} ", show_time(entry.at))?;
        }
        stream.write_all(line)?;
        *within_line = !line.ends_with(b"\n");
    }
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_a_number_or_all() {
        let lines = |text: &str| text.parse::<Lines>().ok();
        assert_eq!((lines("all"), lines("0")), (Some(Lines::All), Some(Lines::Last(0))));
        assert_eq!((lines("-1"), lines("ALL"), lines("")), (None, None, None));
    }

    #[test]
    fn each_line_gets_one_stamp_also_when_it_comes_in_pieces() {
        let entry = |data: &'static str| LogEntry {
            stream: LogStream::Stdout,
            at: SystemTime::UNIX_EPOCH,
            data: data.into(),
        };
        let (mut text, mut within_line) = (Vec::new(), false);
        for piece in ["a", "b\nc\n", "d"] {
            write(&mut text, &entry(piece), true, &mut within_line).unwrap();
        }
        let stamp = "1970-01-01T00:00:00.000Z";
        assert_eq!(String::from_utf8(text).unwrap(), format!("{stamp} ab\n{stamp} c\n{stamp} d"));
    }
}
