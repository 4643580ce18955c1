//! Whatever bytes a peer sends, this side ends with an error or goes on: it never panics and never waits for ever.

use std::time::Duration;

use imp_protocol::connection::{connect, serve_guest};
use imp_protocol::guest::machine_client::MachineClient;
use imp_protocol::guest::{PingRequest, ProcessSpec};
use imp_protocol::hello::{self, Versions};
use proptest::prelude::*;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Far more than any of this takes; a test that reaches it hangs.
const DEADLINE: Duration = Duration::from_secs(30);

const GREETING: &[u8] = b"\nIMP-HOST 1 1 0000000000000007\n";
const ANSWER: &[u8] = b"\nIMP-GUEST 1 1 0.1.0 0000000000000007\n";
/// An HTTP/2 preface with the client's empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime
        .block_on(async { tokio::time::timeout(DEADLINE, future).await.expect("an end within the deadline") })
}

/// One HTTP/2 frame: true to the format in its length, free in all else.
fn frame() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop::collection::vec(any::<u8>(), 0..64);
    (0u8..12, any::<u8>(), 0u32..8, payload).prop_map(|(kind, flags, stream, payload)| {
        let mut frame = vec![0, 0, u8::try_from(payload.len()).expect("short"), kind, flags];
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    })
}

fn frames() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(frame(), 0..24).prop_map(|frames| frames.concat())
}

/// Valid bytes with a few of them changed, dropped or doubled.
fn mutated(valid: &'static [u8]) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec((0..valid.len(), any::<u8>(), 0u8..3), 0..4).prop_map(move |changes| {
        let mut bytes = valid.to_vec();
        for (at, byte, how) in changes {
            let at = at.min(bytes.len() - 1);
            match how {
                0 => drop(bytes.splice(at..=at, [byte])),
                1 if bytes.len() > 1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, byte),
            }
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_greeting_of_any_bytes_has_an_end(noise in prop::collection::vec(any::<u8>(), 0..512), valid in mutated(GREETING)) {
        run(async {
            let (mut host, mut guest) = tokio::io::duplex(1 << 16);
            host.write_all(&noise).await.unwrap();
            host.write_all(&valid).await.unwrap();
            host.shutdown().await.unwrap();
            let _ = hello::answer(&mut guest, Versions::OURS, "0.1.0").await;
        });
    }

    #[test]
    fn a_whole_greeting_is_found_after_any_noise(noise in prop::collection::vec(any::<u8>(), 0..512)) {
        run(async {
            let (mut host, mut guest) = tokio::io::duplex(1 << 16);
            host.write_all(&noise).await.unwrap();
            host.write_all(GREETING).await.unwrap();
            let peer = hello::answer(&mut guest, Versions::OURS, "0.1.0").await.unwrap();
            assert_eq!(peer.version, hello::NEWEST);
        });
    }

    #[test]
    fn a_guest_outlives_a_host_that_sends_any_frames(frames in frames(), preface in mutated(PREFACE)) {
        run(async {
            let (mut host, guest) = tokio::io::duplex(1 << 16);
            host.write_all(GREETING).await.unwrap();
            host.write_all(&preface).await.unwrap();
            host.write_all(&frames).await.unwrap();
            host.shutdown().await.unwrap();
            let drain = async { tokio::io::copy(&mut host, &mut tokio::io::sink()).await };
            let _ = tokio::join!(serve_guest(guest, tonic::service::Routes::default(), "0.1.0"), drain);
        });
    }

    #[test]
    fn a_call_to_a_guest_that_sends_any_frames_ends(frames in frames(), answer in mutated(ANSWER)) {
        run(async {
            let (host, mut guest) = tokio::io::duplex(1 << 16);
            guest.write_all(&answer).await.unwrap();
            guest.write_all(&frames).await.unwrap();
            guest.shutdown().await.unwrap();
            let drain = tokio::spawn(async move { guest.read_to_end(&mut Vec::new()).await });
            if let Ok((connection, _)) = connect(host, 7).await {
                MachineClient::new(connection).ping(PingRequest::default()).await.unwrap_err();
            }
            let _ = drain.await;
        });
    }

    #[test]
    fn a_message_of_any_bytes_is_refused_or_whole(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        if let Ok(spec) = ProcessSpec::decode(bytes.as_slice()) {
            let again = ProcessSpec::decode(spec.encode_to_vec().as_slice()).unwrap();
            prop_assert_eq!(spec, again);
        }
    }
}
