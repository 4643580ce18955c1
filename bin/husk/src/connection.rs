//! One connection of a client, over whatever carries bytes both ways and has said who the client is.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout_at};

use crate::husk::{Deadline, Husk, longest};
use crate::protocol::{Answer, First, Invalid, Lines, Op, Request, first, request};
use crate::refusal::Refusal;

/// How long a client may be silent before its first request, and between requests.
const IDLE: Duration = Duration::from_secs(90);
/// How long a line may take from its first byte, and a request from its op.
const LINE: Duration = Duration::from_secs(10);
/// How long a client may take to read an answer.
const READS: Duration = Duration::from_secs(10);
/// Bytes read at once.
const CHUNK: usize = 16 << 10;

/// Serves requests one after the other, until the client leaves, is silent for too long, or says what makes no sense.
pub(crate) async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin, husk: Arc<Husk>) {
    let mut lines = Lines::default();
    loop {
        let (answer, next) = match one(&mut stream, &mut lines, &husk).await {
            Ok(Some(answered)) => answered,
            Ok(None) => return,
            Err(refusal) => (refusal.answer(), Next::Close),
        };
        if write(&mut stream, &answer).await.is_err() || next == Next::Close {
            return;
        }
    }
}

/// Whether another request may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    GoOn,
    Close,
}

/// Reads a request and answers it. None: the client has nothing to say.
async fn one(
    stream: &mut (impl AsyncRead + Unpin),
    lines: &mut Lines,
    husk: &Arc<Husk>,
) -> Result<Option<(Answer, Next)>, Refusal> {
    let line = tokio::select! {
        line = line(stream, lines, Instant::now() + IDLE) => line?,
        // Nobody is asked any more.
        () = husk.ending.cancelled() => None,
    };
    let Some(line) = line else { return Ok(None) };
    let began = Instant::now();
    match first(&line)? {
        First::Activate(activate) => {
            let deadline = Deadline::from(began, None, longest(Op::Activate));
            Ok(Some((husk.answer(Request::Activate(activate), deadline).await, Next::Close)))
        }
        First::Op { op, deadline } => {
            let deadline = Deadline::from(began, deadline, longest(op));
            let until = deadline.at.min(began + LINE);
            let Some(line) = self::line(stream, lines, until).await? else {
                return Err(if until == deadline.at { deadline.late() } else { Refusal::Silent(LINE) });
            };
            Ok(Some((husk.answer(request(op, &line)?, deadline).await, Next::GoOn)))
        }
    }
}

/// The next line. None: there was no byte of it by then, or the client left. A line that has begun has its own time.
async fn line(
    stream: &mut (impl AsyncRead + Unpin),
    lines: &mut Lines,
    mut until: Instant,
) -> Result<Option<Vec<u8>>, Refusal> {
    let mut chunk = vec![0; CHUNK];
    let mut has_begun = false;
    loop {
        if let Some(line) = lines.next()? {
            return Ok(Some(line));
        }
        if !has_begun && !lines.is_empty() {
            has_begun = true;
            until = until.min(Instant::now() + LINE);
        }
        match (timeout_at(until, stream.read(&mut chunk)).await, has_begun) {
            (Ok(Ok(0) | Err(_)), true) => return Err(Invalid::Unfinished.into()),
            (Ok(Ok(0) | Err(_)), false) | (Err(_), false) => return Ok(None),
            (Err(_), true) => return Err(Refusal::Silent(LINE)),
            (Ok(Ok(read)), _) => lines.push(chunk.get(..read).unwrap_or_default()),
        }
    }
}

pub(crate) async fn write(stream: &mut (impl AsyncWrite + Unpin), answer: &Answer) -> std::io::Result<()> {
    let written = async {
        stream.write_all(&answer.line()).await?;
        stream.flush().await
    };
    tokio::time::timeout(READS, written).await?
}
