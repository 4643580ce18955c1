//! Archives over the lane: a socket stands in for its port.
#![expect(clippy::unwrap_used, reason = "helpers of tests, though not test functions")]

mod agent;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use bytes::Bytes;
use imp_protocol::guest::{
    FileChunk, OpenArchive, ReadArchiveRequest, WriteArchiveInput, WriteArchiveResponse, write_archive_input,
};
use imp_protocol::hello::{self, Versions};
use imp_protocol::lane::{MOST, Reader, TAKEN, Writer};
use tonic::{Code, Status};

use self::agent::Host;

/// The other end of the lane, greeted under a number.
async fn greeted(lane: &UnixStream, number: u64) -> UnixStream {
    lane.set_nonblocking(true).unwrap();
    let mut stream = tokio::net::UnixStream::from_std(lane.try_clone().unwrap()).unwrap();
    hello::greet(&mut stream, Versions::OURS, number).await.unwrap();
    let lane = stream.into_std().unwrap();
    lane.set_nonblocking(false).unwrap();
    lane
}

/// The only end of a stream to the lane, and the agent's work on the other one.
async fn greeted_stream(
    host: &Host,
    number: u64,
) -> (UnixStream, tokio::task::JoinHandle<std::io::Result<()>>) {
    let (lane, serving) = host.lane_stream();
    (greeted(&lane, number).await, serving)
}

fn path_bytes(path: &Path) -> Bytes {
    Bytes::copy_from_slice(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()))
}

async fn write(host: &Host, path: &Path, number: u64) -> Result<WriteArchiveResponse, Status> {
    let open = OpenArchive { path: path_bytes(path), lane: Some(number), ..Default::default() };
    let input = WriteArchiveInput { input: Some(write_archive_input::Input::Open(open)) };
    Ok(host.files().write_archive(tokio_stream::iter([input])).await?.into_inner())
}

/// Messages of the call until its end.
async fn read(host: &Host, path: &Path, number: u64) -> Result<Vec<FileChunk>, Status> {
    let request = ReadArchiveRequest { path: path_bytes(path), lane: Some(number), ..Default::default() };
    let mut stream = host.files().read_archive(request).await?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

fn taken(mut lane: &UnixStream) {
    let mut said = [0];
    lane.read_exact(&mut said).unwrap();
    assert_eq!(said, [TAKEN]);
}

fn archive(from: &Path) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_dir_all(".", from).unwrap();
    builder.into_inner().unwrap()
}

/// Sends bytes once the lane is taken.
async fn send(lane: UnixStream, bytes: Vec<u8>) -> UnixStream {
    let sent = tokio::task::spawn_blocking(move || {
        taken(&lane);
        // An agent that takes no more says why in the answer.
        let _ = (&lane).write_all(&bytes);
        lane
    });
    sent.await.unwrap()
}

fn chunks(archive: &[u8], size: usize) -> Vec<u8> {
    let mut lane = Vec::new();
    let mut writer = Writer::new(&mut lane);
    archive.chunks(size).for_each(|part| writer.write_all(part).unwrap());
    writer.finish().unwrap();
    lane
}

/// A directory with a file of more than one piece, and its archive.
fn tree() -> (tempfile::TempDir, Vec<u8>) {
    let from = tempfile::tempdir().unwrap();
    fs::create_dir(from.path().join("sub")).unwrap();
    let content: Vec<u8> = (0..3_500_000_u32).map(|at| (at % 251) as u8 + 1).collect();
    fs::write(from.path().join("sub/large"), content).unwrap();
    fs::write(from.path().join("small"), "small").unwrap();
    let archive = archive(from.path());
    (from, archive)
}

#[tokio::test]
async fn archives_go_both_ways_one_call_after_the_other() {
    let (host, (from, sent), to) = (Host::connect().await, tree(), tempfile::tempdir().unwrap());
    let lane = host.lane();
    std::os::unix::net::UnixListener::bind(to.path().join("socket")).unwrap();
    for (number, size) in [(1, 700), (2, 256 << 10), (3, MOST)] {
        let lane = greeted(&lane, number).await;
        let (written, _) = tokio::join!(write(&host, to.path(), number), send(lane, chunks(&sent, size)));
        assert_eq!(written.unwrap().bytes, 3_500_005, "in chunks of {size} bytes");
        let large = fs::read(to.path().join("sub/large")).unwrap();
        assert!(large == fs::read(from.path().join("sub/large")).unwrap());
    }
    let lane = greeted(&lane, 4).await;
    let receiving = tokio::task::spawn_blocking(move || {
        taken(&lane);
        let mut archive = Vec::new();
        Reader::new(&lane).read_to_end(&mut archive).map(|_| archive)
    });
    let (messages, archive) = tokio::join!(read(&host, to.path(), 4), receiving);
    // What is left out is said by the call, as without a lane, and nothing else.
    let messages = messages.unwrap();
    assert!(messages.iter().all(|message| message.data.is_empty()));
    let left_out: Vec<_> = messages.iter().flat_map(|message| &message.left_out).collect();
    assert_eq!(left_out, ["socket"]);
    let back = tempfile::tempdir().unwrap();
    tar::Archive::new(&archive.unwrap().unwrap()[..]).unpack(back.path()).unwrap();
    let large = fs::read(back.path().join("sub/large")).unwrap();
    assert!(large == fs::read(from.path().join("sub/large")).unwrap());
    assert_eq!(fs::read(back.path().join("small")).unwrap(), b"small");
}

#[tokio::test]
async fn an_archive_that_is_cut_off_or_in_chunks_that_are_too_long_is_refused_and_the_lane_goes_on() {
    let (host, (_from, sent), to) = (Host::connect().await, tree(), tempfile::tempdir().unwrap());
    let whole = chunks(&sent, 256 << 10);
    // In the middle of a chunk, between two, and where only the end is missing.
    for end in [1_000_000, 4 + (256 << 10), whole.len() - 4] {
        let lane = host.lane();
        let stream = greeted(&lane, 1).await;
        let sending = async {
            let stream = send(stream, whole[..end].to_vec()).await;
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        };
        let (written, ()) = tokio::join!(write(&host, to.path(), 1), sending);
        assert!(written.is_err(), "{end} of {} bytes were taken for the archive", whole.len());
    }
    let lane = host.lane();
    for (number, length) in [(2, MOST as u32 + 1), (3, u32::MAX)] {
        let stream = greeted(&lane, number).await;
        let lane = [&length.to_be_bytes()[..], &sent].concat();
        let (written, _) = tokio::join!(write(&host, to.path(), number), send(stream, lane));
        assert!(written.is_err(), "a chunk of {length} bytes");
    }
    // Nobody has hung up: what such a host has sent besides is passed over.
    let stream = greeted(&lane, 4).await;
    let (written, _) = tokio::join!(write(&host, to.path(), 4), send(stream, whole));
    assert_eq!(written.unwrap().entries, 4);
}

#[tokio::test]
async fn a_lane_is_taken_once_and_under_its_latest_number_only() {
    let (host, (_from, sent), to) = (Host::connect().await, tree(), tempfile::tempdir().unwrap());
    assert_eq!(write(&host, to.path(), 1).await.unwrap_err().code(), Code::Aborted);
    let lane = host.lane();
    greeted(&lane, 1).await;
    let stream = greeted(&lane, 2).await;
    for number in [1, 3] {
        assert_eq!(write(&host, to.path(), number).await.unwrap_err().code(), Code::Aborted);
    }
    let mut first = Box::pin(write(&host, to.path(), 2));
    tokio::select! {
        ended = &mut first => panic!("nothing was sent: {ended:?}"),
        () = async { stream.set_nonblocking(true).unwrap(); readable(&stream).await } => {}
    }
    stream.set_nonblocking(false).unwrap();
    assert_eq!(read(&host, to.path(), 2).await.unwrap_err().code(), Code::Aborted);
    let (written, _) = tokio::join!(first, send(stream, chunks(&sent, MOST)));
    written.unwrap();
}

#[tokio::test]
async fn a_lane_is_free_again_when_its_call_has_ended_whoever_still_waits_on_it() {
    let (host, (_from, sent), to) = (Host::connect().await, tree(), tempfile::tempdir().unwrap());
    let large_path = to.path().join("large");
    let large = fs::File::create(&large_path).unwrap();
    large.set_len(1 << 30).unwrap();
    let lane = host.lane();
    // Two hosts that leave in the middle without a hang-up that the agent could see: one sends no more, one reads nothing.
    let stream = greeted(&lane, 1).await;
    let mut call = Box::pin(write(&host, to.path(), 1));
    tokio::select! {
        ended = &mut call => panic!("it has no end: {ended:?}"),
        () = async { send(stream, chunks(&sent, MOST)[..1_500_000].to_vec()).await; } => {}
    }
    drop(call);
    greeted_at_last(&lane, 10).await;
    let stream = greeted(&lane, 2).await;
    let mut call = Box::pin(read(&host, &large_path, 2));
    tokio::select! {
        ended = &mut call => panic!("nobody reads it: {ended:?}"),
        () = readable(&stream) => {}
    }
    drop(call);
    greeted_at_last(&lane, 20).await;
    let stream = greeted(&lane, 3).await;
    let (written, _) = tokio::join!(write(&host, to.path(), 3), send(stream, chunks(&sent, MOST)));
    assert_eq!(written.unwrap().bytes, 3_500_005);
}

#[tokio::test]
async fn over_vsock_each_host_has_a_stream_of_its_own_and_the_latest_has_the_lane() {
    let (host, (from, sent), to) = (Host::connect().await, tree(), tempfile::tempdir().unwrap());
    let (early, early_serving) = greeted_stream(&host, 1).await;
    let (late, serving) = greeted_stream(&host, 2).await;
    // The end of a host that came first takes nothing from the one that came after it.
    drop(early);
    early_serving.await.unwrap().unwrap();
    assert_eq!(write(&host, to.path(), 1).await.unwrap_err().code(), Code::Aborted);
    let (written, late) = tokio::join!(write(&host, to.path(), 2), send(late, chunks(&sent, MOST)));
    assert_eq!(written.unwrap().bytes, 3_500_005);
    // The call has ended, and its stream waits for the host.
    assert!(!serving.is_finished());
    drop(late);
    serving.await.unwrap().unwrap();

    let (lane, serving) = greeted_stream(&host, 3).await;
    fs::remove_dir_all(from.path().join("sub")).unwrap();
    let messages = read(&host, from.path(), 3).await.unwrap();
    assert!(messages.iter().all(|message| message.data.is_empty()));
    // Read after the call has ended: nothing of it is lost.
    let archive = tokio::task::spawn_blocking(move || {
        taken(&lane);
        let mut archive = Vec::new();
        Reader::new(&lane).read_to_end(&mut archive).map(|_| archive)
    });
    let back = tempfile::tempdir().unwrap();
    tar::Archive::new(&archive.await.unwrap().unwrap()[..]).unpack(back.path()).unwrap();
    assert_eq!(fs::read(back.path().join("small")).unwrap(), b"small");
    serving.await.unwrap().unwrap();
}

async fn readable(lane: &UnixStream) {
    lane.set_nonblocking(true).unwrap();
    let stream = tokio::net::UnixStream::from_std(lane.try_clone().unwrap()).unwrap();
    stream.readable().await.unwrap();
}

/// A greeting that somebody else has swallowed is sent again, under another number.
async fn greeted_at_last(lane: &UnixStream, first: u64) {
    let patience = std::time::Duration::from_millis(200);
    for number in first.. {
        if tokio::time::timeout(patience, greeted(lane, number)).await.is_ok() {
            return;
        }
    }
}
