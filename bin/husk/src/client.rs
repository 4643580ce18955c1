//! The client: one request over the control socket, and its answer on stdout.

mod variables;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Serialize;

use crate::args;
use crate::protocol::{LONGEST, Lines, Variables};

/// More than any husk takes for a request.
const PATIENCE: Duration = Duration::from_secs(300);
/// Bytes read at once.
const CHUNK: usize = 16 << 10;

#[derive(Serialize)]
struct OpLine {
    op: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    deadline_ms: Option<u64>,
}

#[derive(Default, Serialize)]
struct Request<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_dir: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expected_digest: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fork_snapshot: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_network: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vm_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    env: Option<Variables>,
    #[serde(skip_serializing_if = "Option::is_none")]
    secrets: Option<Variables>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fork_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    with_secrets: Option<bool>,
}

/// Whether the answer was good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Result {
    Good,
    Refused,
}

pub(crate) fn prepare(args: &args::Prepare) -> anyhow::Result<Result> {
    ask(&args.to, "prepare", &of_machine(&args.machine, Some(&args.snapshot_dir))?)
}

pub(crate) fn activate(args: &args::Activate) -> anyhow::Result<Result> {
    let (env, secrets) = variables::of(args, |name| std::env::var(name).ok())?;
    let request = of_machine(&args.machine, args.snapshot_dir.as_deref())?;
    let some = |variables: Variables| (!variables.is_empty()).then_some(variables);
    ask(&args.to, "activate", &Request { env: some(env), secrets: some(secrets), ..request })
}

pub(crate) fn fork_snapshot(args: &args::ForkSnapshot) -> anyhow::Result<Result> {
    let request = Request {
        fork_id: Some(&args.fork_id),
        snapshot_dir: args.snapshot_dir.as_deref().map(here).transpose()?,
        with_secrets: args.with_secrets.then_some(true),
        ..Request::default()
    };
    ask(&args.to, "fork-snapshot", &request)
}

pub(crate) fn remove_fork_snapshot(args: &args::RemoveForkSnapshot) -> anyhow::Result<Result> {
    ask(&args.to, "remove-fork-snapshot", &Request { fork_id: Some(&args.fork_id), ..Request::default() })
}

pub(crate) fn status(args: &args::Status) -> anyhow::Result<Result> {
    ask(&args.to, "status", &Request::default())
}

fn of_machine<'a>(machine: &'a args::Machine, directory: Option<&'a Path>) -> anyhow::Result<Request<'a>> {
    Ok(Request {
        snapshot_dir: directory.map(here).transpose()?,
        expected_digest: machine.expected_digest.as_deref(),
        fork_snapshot: machine.fork_snapshot.then_some(true),
        egress: machine.egress.map(args::Egress::name),
        block_network: machine.block_network.then_some(true),
        vm_id: machine.vm_id.as_deref(),
        ..Request::default()
    })
}

/// The husk works from another directory.
fn here(path: &Path) -> anyhow::Result<PathBuf> {
    ensure!(path.to_str().is_some(), "--snapshot-dir is not UTF-8");
    Ok(std::path::absolute(path)?)
}

fn ask(to: &args::To, op: &'static str, request: &Request) -> anyhow::Result<Result> {
    let socket = &to.control_socket;
    let reach = || format!("no husk answers on {}: start one with `husk serve`", socket.display());
    let mut stream = UnixStream::connect(socket).with_context(reach)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut lines = serde_json::to_vec(&OpLine { op, deadline_ms: to.deadline_ms })?;
    lines.push(b'\n');
    let line = serde_json::to_vec(request)?;
    ensure!(line.len() <= LONGEST, "the variables are too long: a request may have {LONGEST} bytes");
    lines.extend(line);
    lines.push(b'\n');
    // One that answers before it has read everything has refused: the answer says why.
    let sent = stream.write_all(&lines);
    let answer = match (answer(&mut stream), sent) {
        (Ok(answer), _) => answer,
        (Err(_), Err(error)) => return Err(error).with_context(reach),
        (Err(error), Ok(())) => return Err(error).context("the husk ended before it answered"),
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&answer)?;
    stdout.write_all(b"\n")?;
    stdout.flush()?;
    let answer: serde_json::Value = serde_json::from_slice(&answer).context("the answer is not JSON")?;
    let is_good = answer.get("ok").and_then(serde_json::Value::as_bool).unwrap_or(false);
    Ok(if is_good { Result::Good } else { Result::Refused })
}

fn answer(stream: &mut UnixStream) -> anyhow::Result<Vec<u8>> {
    let mut lines = Lines::default();
    let mut chunk = vec![0; CHUNK];
    loop {
        if let Some(line) = lines.next()? {
            return Ok(line);
        }
        let read = stream.read(&mut chunk)?;
        ensure!(read > 0, "it closed the connection");
        lines.push(chunk.get(..read).unwrap_or_default());
    }
}
