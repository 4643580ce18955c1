//! The program of a VM and what bounds it, as the owner's socket carries them.

use std::path::PathBuf;

use imp_protocol::{guest, runtime as wire};
use imp_runtime::spec::{Arguments, BaseDisk, Bytes, Environment, Limits, MainProcess, Stdin, Terminal};

use super::{Error, path_text};

pub(super) fn base_to_wire(base: &BaseDisk) -> wire::BaseDisk {
    wire::BaseDisk { image: base.image.clone(), key: base.key.clone(), path: path_text(&base.path) }
}

pub(super) fn base_from_wire(base: wire::BaseDisk) -> BaseDisk {
    BaseDisk { image: base.image, key: base.key, path: PathBuf::from(base.path) }
}

pub(super) fn main_to_wire(main: &MainProcess) -> guest::ProcessSpec {
    guest::ProcessSpec {
        arguments: words_to_wire(&main.arguments),
        environment: variables_to_wire(&main.environment),
        user: main.user.clone(),
        working_directory: main.working_directory.as_slice().to_vec().into(),
        terminal: main.terminal.as_ref().map(|terminal| guest::Terminal {
            rows: terminal.rows.into(),
            columns: terminal.columns.into(),
            term: terminal.term.clone(),
        }),
        stdin: main.stdin == Stdin::Attached,
        stop_signal: main.stop_signal.clone(),
        limits: Some(guest::ProcessLimits { open_files: main.open_files.unwrap_or(0), ..Default::default() }),
        ..Default::default()
    }
}

pub(super) fn main_from_wire(main: guest::ProcessSpec) -> Result<MainProcess, Error> {
    let cells = |number: u32| u16::try_from(number).map_err(|_| Error::Field("terminal"));
    Ok(MainProcess {
        arguments: Arguments::new(main.arguments)?,
        environment: Environment::new(main.environment)?,
        user: main.user,
        working_directory: Bytes::new(main.working_directory)?,
        terminal: match main.terminal {
            None => None,
            Some(terminal) => Some(Terminal {
                rows: cells(terminal.rows)?,
                columns: cells(terminal.columns)?,
                term: terminal.term,
            }),
        },
        stdin: if main.stdin { Stdin::Attached } else { Stdin::Null },
        stop_signal: main.stop_signal,
        open_files: limit(main.limits.unwrap_or_default().open_files),
    })
}

pub(super) fn limits_to_wire(limits: &Limits) -> wire::Limits {
    wire::Limits {
        processes: limits.processes.unwrap_or(0),
        cpu_millis: limits.cpu_millis.unwrap_or(0),
        disk_bytes_per_second: limits.disk_bytes_per_second.unwrap_or(0),
        disk_requests_per_second: limits.disk_requests_per_second.unwrap_or(0),
        network_bytes_per_second: limits.network_bytes_per_second.unwrap_or(0),
        network_packets_per_second: limits.network_packets_per_second.unwrap_or(0),
    }
}

pub(super) fn limits_from_wire(limits: wire::Limits) -> Limits {
    Limits {
        processes: limit(limits.processes),
        cpu_millis: limit(limits.cpu_millis),
        disk_bytes_per_second: limit(limits.disk_bytes_per_second),
        disk_requests_per_second: limit(limits.disk_requests_per_second),
        network_bytes_per_second: limit(limits.network_bytes_per_second),
        network_packets_per_second: limit(limits.network_packets_per_second),
    }
}

pub(super) fn words_to_wire(words: &Arguments) -> Vec<bytes::Bytes> {
    words.iter().map(|word| word.to_vec().into()).collect()
}

pub(super) fn variables_to_wire(environment: &Environment) -> Vec<bytes::Bytes> {
    environment.expose().iter().map(|variable| variable.clone().into()).collect()
}

/// On the wire 0 is none.
fn limit<N: Default + PartialEq>(number: N) -> Option<N> {
    (number != N::default()).then_some(number)
}
