//! As much of HTTP as fetches one page.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// A port that nobody listened on a moment ago.
pub(crate) fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The page at `/`, as soon as somebody serves it.
pub(crate) fn fetch(port: u16, deadline: Duration) -> anyhow::Result<String> {
    let until = Instant::now() + deadline;
    loop {
        let problem = match page(port) {
            Ok(page) => return Ok(page),
            Err(problem) => problem,
        };
        if Instant::now() > until {
            return Err(problem)
                .with_context(|| format!("nothing was served at port {port} within {deadline:?}"));
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn page(port: u16) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.split_once("\r\n\r\n") {
        Some((head, page)) if head.contains(" 200 ") => Ok(page.to_owned()),
        _ => bail!("the answer is no page: {answer:?}"),
    }
}
