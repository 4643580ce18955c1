//! Turns what a host asks for into what can be started, or says what is wrong with it.

use std::ffi::CString;
use std::time::Duration;

use bytes::Bytes;
use imp_protocol::guest::{ProcessSpec, Terminal};
use imp_sys::signals::Number;

use super::signal;
use crate::accounts::{self, Account, Accounts};

/// As the OCI runtimes that images are made for.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const LONGEST_ID: usize = 128;

/// Id of the VM's main process.
pub(super) const MAIN: &str = "main";

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("`id` must have 1 to {LONGEST_ID} characters of [a-zA-Z0-9._-], not {0:?}")]
    Id(String),
    #[error("`arguments` is empty: name a program")]
    NoProgram,
    #[error("a zero byte in `{0}`: the kernel cannot pass it on")]
    ZeroByte(&'static str),
    #[error("`environment` has {0:?}: entries are NAME=value")]
    Environment(String),
    #[error("`working_directory` must be absolute, not {0:?}")]
    Directory(String),
    #[error("`terminal` is at most 65535 rows and columns")]
    Size,
    #[error(transparent)]
    Account(#[from] accounts::Error),
    #[error(transparent)]
    Signal(#[from] signal::Unknown),
}

/// A process that can be started.
#[derive(Debug)]
pub(crate) struct Launch {
    /// None: the agent chooses.
    pub(crate) id: Option<ProcessId>,
    pub(crate) programs: Vec<CString>,
    pub(crate) arguments: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    pub(crate) directory: CString,
    pub(crate) account: Account,
    pub(crate) terminal: Option<Size>,
    pub(crate) stdin: Stdin,
    pub(crate) life: Life,
    pub(crate) limits: Limits,
    pub(crate) stop_signal: Option<Number>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ProcessId(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stdin {
    Connected,
    Null,
}

/// What ends a process besides itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// It is killed with the stream that started it.
    OfItsStream,
    /// It outlives that stream, and its last output is kept.
    Detached,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) rows: u16,
    pub(crate) columns: u16,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Limits {
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) processes: Option<u32>,
    pub(crate) open_files: Option<u64>,
    pub(crate) cpu_millis: Option<u32>,
    pub(crate) timeout: Option<Duration>,
}

impl ProcessId {
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if (1..=LONGEST_ID).contains(&text.len()) && text.bytes().all(allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(Error::Id(text.chars().take(LONGEST_ID).collect()))
        }
    }

    pub(crate) fn numbered(number: u64) -> Self {
        Self(format!("exec-{number}"))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the process whose end is the machine's.
    pub(crate) fn main() -> Self {
        Self(MAIN.to_owned())
    }

    pub(crate) fn is_main(&self) -> bool {
        self.0 == MAIN
    }
}

impl Size {
    pub(crate) fn parse(terminal: &Terminal) -> Result<Self, Error> {
        let number = |value: u32| u16::try_from(value).map_err(|_| Error::Size);
        Ok(Self { rows: number(terminal.rows)?, columns: number(terminal.columns)? })
    }
}

impl Launch {
    pub(crate) fn parse(spec: ProcessSpec, accounts: &Accounts) -> Result<Self, Error> {
        let id = if spec.id.is_empty() { None } else { Some(ProcessId::parse(&spec.id)?) };
        let account = accounts.resolve(&spec.user)?;
        let program = spec.arguments.first().filter(|program| !program.is_empty()).ok_or(Error::NoProgram)?;
        let environment = environment(&spec.environment, spec.terminal.as_ref(), &account.home)?;
        let programs = programs(program, &environment)?;
        let directory = if spec.working_directory.is_empty() { &b"/"[..] } else { &spec.working_directory };
        if directory.first() != Some(&b'/') {
            return Err(Error::Directory(String::from_utf8_lossy(directory).into_owned()));
        }
        let limits = spec.limits.unwrap_or_default();
        Ok(Self {
            id,
            programs,
            arguments: spec
                .arguments
                .iter()
                .map(|word| string("arguments", word))
                .collect::<Result<_, _>>()?,
            directory: string("working_directory", directory)?,
            environment: environment
                .into_iter()
                .map(|entry| string("environment", &entry))
                .collect::<Result<_, _>>()?,
            account,
            terminal: spec.terminal.as_ref().map(Size::parse).transpose()?,
            stdin: if spec.stdin { Stdin::Connected } else { Stdin::Null },
            life: if spec.detach { Life::Detached } else { Life::OfItsStream },
            limits: Limits {
                memory_bytes: Some(limits.memory_bytes).filter(|limit| *limit > 0),
                processes: Some(limits.processes).filter(|limit| *limit > 0),
                open_files: Some(u64::from(limits.open_files)).filter(|limit| *limit > 0),
                cpu_millis: Some(limits.cpu_millis).filter(|limit| *limit > 0),
                timeout: Some(limits.timeout_milliseconds)
                    .filter(|limit| *limit > 0)
                    .map(Duration::from_millis),
            },
            stop_signal: if spec.stop_signal.is_empty() {
                None
            } else {
                Some(signal::parse(&spec.stop_signal)?)
            },
        })
    }
}

/// NAME=value, each name once, the last one winning; HOME and TERM only where they are not given.
fn environment(given: &[Bytes], terminal: Option<&Terminal>, home: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
    let mut entries: Vec<Vec<u8>> = Vec::with_capacity(given.len() + 2);
    let mut places = std::collections::HashMap::with_capacity(given.len());
    for entry in given {
        let equals = entry.iter().position(|byte| *byte == b'=').filter(|position| *position > 0);
        let Some(name) = equals.and_then(|end| entry.get(..end)) else {
            let shown = entry.split(|byte| *byte == b'=').next().unwrap_or_default();
            return Err(Error::Environment(String::from_utf8_lossy(shown).into_owned()));
        };
        let place = *places.entry(name).or_insert(entries.len());
        match entries.get_mut(place) {
            Some(earlier) => *earlier = entry.to_vec(),
            None => entries.push(entry.to_vec()),
        }
    }
    if !places.contains_key(&b"HOME"[..]) {
        entries.push([b"HOME=", home].concat());
    }
    if let Some(terminal) = terminal.filter(|_| !places.contains_key(&b"TERM"[..])) {
        let term = if terminal.term.is_empty() { "xterm" } else { &terminal.term };
        entries.push([b"TERM=", term.as_bytes()].concat());
    }
    Ok(entries)
}

/// Where the program may be: itself when it has a '/', else in each directory of PATH.
fn programs(program: &[u8], environment: &[Vec<u8>]) -> Result<Vec<CString>, Error> {
    if program.contains(&b'/') {
        return Ok(vec![string("arguments", program)?]);
    }
    let path = environment.iter().find_map(|entry| entry.strip_prefix(b"PATH=")).unwrap_or(DEFAULT_PATH);
    path.split(|byte| *byte == b':')
        .map(|directory| {
            let directory = if directory.is_empty() { b"." } else { directory };
            string("arguments", &[directory, b"/", program].concat())
        })
        .collect()
}

fn string(field: &'static str, bytes: &[u8]) -> Result<CString, Error> {
    CString::new(bytes).map_err(|_| Error::ZeroByte(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(words: &[&str]) -> ProcessSpec {
        let arguments = words.iter().map(|word| Bytes::copy_from_slice(word.as_bytes())).collect();
        ProcessSpec { arguments, ..Default::default() }
    }

    fn text(strings: &[CString]) -> Vec<&str> {
        strings.iter().map(|string| string.to_str().unwrap()).collect()
    }

    #[test]
    fn the_program_is_looked_for_in_the_path_it_is_given() {
        let mut asked = spec(&["tool", "$x"]);
        asked.environment = vec!["PATH=/a::/b".into(), "X=1".into(), "X=2".into()];
        let launch = Launch::parse(asked, &Accounts::default()).unwrap();
        assert_eq!(text(&launch.programs), ["/a/tool", "./tool", "/b/tool"]);
        assert_eq!(text(&launch.arguments), ["tool", "$x"]);
        assert_eq!(text(&launch.environment), ["PATH=/a::/b", "X=2", "HOME=/"]);
        let direct = Launch::parse(spec(&["dir/tool"]), &Accounts::default()).unwrap();
        assert_eq!(text(&direct.programs), ["dir/tool"]);
    }

    #[test]
    fn a_terminal_brings_its_name_unless_one_is_given() {
        let mut asked = spec(&["/x"]);
        asked.terminal = Some(Terminal::default());
        let launch = Launch::parse(asked.clone(), &Accounts::default()).unwrap();
        assert_eq!(text(&launch.environment), ["HOME=/", "TERM=xterm"]);
        asked.environment = vec!["TERM=dumb".into(), "HOME=/h".into()];
        let launch = Launch::parse(asked, &Accounts::default()).unwrap();
        assert_eq!(text(&launch.environment), ["TERM=dumb", "HOME=/h"]);
    }

    #[test]
    fn bad_specs_are_refused_with_a_reason() {
        let refused = |change: fn(&mut ProcessSpec)| {
            let mut asked = spec(&["/x"]);
            change(&mut asked);
            Launch::parse(asked, &Accounts::default()).unwrap_err()
        };
        assert!(matches!(refused(|spec| spec.arguments.clear()), Error::NoProgram));
        assert!(matches!(refused(|spec| spec.id = "a/b".into()), Error::Id(_)));
        assert!(matches!(refused(|spec| spec.id = "a".repeat(129)), Error::Id(_)));
        assert!(matches!(refused(|spec| spec.arguments.push("a\0b".into())), Error::ZeroByte("arguments")));
        assert!(matches!(refused(|spec| spec.environment.push("=x".into())), Error::Environment(_)));
        assert!(matches!(refused(|spec| spec.working_directory = "tmp".into()), Error::Directory(_)));
        assert!(matches!(refused(|spec| spec.user = "nobody".into()), Error::Account(_)));
        assert!(matches!(refused(|spec| spec.stop_signal = "SIGX".into()), Error::Signal(_)));
    }
}
