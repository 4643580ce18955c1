//! Streams that nobody reads hold up no other, whichever way their bytes go.

mod agent;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use imp_protocol::guest::forward_input::Input as Forward;
use imp_protocol::guest::{ForwardInput, OpenPort, PingRequest};
use tokio_stream::StreamExt as _;

use self::agent::{Host, collect, sh};

/// More than fill a window of 16 MiB when each stream may have 2 MiB.
const STUCK: usize = 12;
/// Calls that are answered while nothing else moves.
const STILL: u32 = 200;
const DEADLINE: Duration = Duration::from_secs(60);

/// Calls the agent until the others have come to a stand, and then some more.
async fn is_answered_while_others_are_stuck(host: &Host, moved: impl Fn() -> u64) {
    let (mut last, mut still) = (0, 0);
    while still < STILL {
        let ping = async { host.machine().ping(PingRequest::default()).await };
        let answer = tokio::time::timeout(DEADLINE, ping).await.expect("an answer while others are stuck");
        answer.expect("a pong");
        let now = moved();
        still = if now == last { still + 1 } else { 0 };
        last = now;
    }
    let other = tokio::time::timeout(DEADLINE, async { collect(host.exec(sh("echo other")).await).await });
    assert_eq!(other.await.expect("a program while others are stuck").stdout, "other\n");
}

#[tokio::test]
async fn input_for_ports_that_nobody_reads_holds_up_no_other_call() {
    let host = Host::connect().await;
    // It takes connections, and never reads.
    let deaf = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = deaf.local_addr().unwrap().port().into();
    let sent = Arc::new(AtomicU64::new(0));
    let mut streams = Vec::new();
    for _ in 0..STUCK {
        let sent = Arc::clone(&sent);
        let open = Forward::Open(OpenPort { port, address: String::new() });
        let chunk = bytes::Bytes::from(vec![b'x'; 64 << 10]);
        let data = tokio_stream::iter(std::iter::repeat_with(move || {
            sent.fetch_add(1, Ordering::Relaxed);
            Forward::Data(chunk.clone())
        }));
        let inputs = tokio_stream::once(open).chain(data).map(|input| ForwardInput { input: Some(input) });
        streams.push(host.ports().forward(inputs).await.unwrap().into_inner());
    }
    is_answered_while_others_are_stuck(&host, || sent.load(Ordering::Relaxed)).await;
    // As much as the windows of nine streams, at least: they were full.
    assert!(sent.load(Ordering::Relaxed) * (64 << 10) > 18 << 20);
}

#[tokio::test]
async fn output_that_nobody_reads_holds_up_no_other_call() {
    let host = Host::connect().await;
    let folder = tempfile::tempdir().unwrap();
    let mut stuck = Vec::new();
    for number in 0..STUCK {
        // Each says how much of its output was taken.
        let count = folder.path().join(number.to_string());
        let script = format!(
            "i=0; while head -c 65536 /dev/zero; do i=$((i + 1)); echo $i > {0}.new; mv {0}.new {0}; done",
            count.display()
        );
        stuck.push((count, host.exec(sh(&script)).await));
    }
    let moved = || {
        let of = |path: &std::path::Path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        stuck.iter().filter_map(|(count, _)| of(count)).sum::<u64>()
    };
    is_answered_while_others_are_stuck(&host, moved).await;
    assert!(moved() * (64 << 10) > 18 << 20);
}
