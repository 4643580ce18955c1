use std::io::Write;
use std::sync::Arc;

use tokio::sync::watch;

use super::*;

fn writer(directory: &std::path::Path) -> LogWriter {
    LogWriter::open(directory, Arc::new(watch::channel(0).0)).unwrap()
}

async fn all(reader: &mut LogReader) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(entry) = reader.next().await.unwrap() {
        bytes.extend(entry.data);
    }
    bytes
}

async fn read(directory: &std::path::Path, query: LogQuery) -> String {
    let mut reader = LogReader::open(directory, query, None).unwrap();
    String::from_utf8(all(&mut reader).await).unwrap()
}

#[tokio::test]
async fn what_is_written_is_read_back_with_its_stream() {
    let directory = tempfile::tempdir().unwrap();
    let mut log = writer(directory.path());
    log.append(LogStream::Stdout, b"one");
    log.append(LogStream::Stderr, b"two");
    let mut reader = LogReader::open(directory.path(), LogQuery::default(), None).unwrap();
    let one = reader.next().await.unwrap().unwrap();
    let two = reader.next().await.unwrap().unwrap();
    assert_eq!((one.stream, one.data.as_slice()), (LogStream::Stdout, &b"one"[..]));
    assert_eq!((two.stream, two.data.as_slice()), (LogStream::Stderr, &b"two"[..]));
    assert!(two.at >= one.at);
    assert_eq!(reader.next().await.unwrap(), None);
}

#[tokio::test]
async fn a_guest_that_floods_leaves_two_bounded_files_and_the_last_output() {
    let directory = tempfile::tempdir().unwrap();
    let mut log = writer(directory.path());
    for _ in 0..200 {
        log.append(LogStream::Stdout, &[b'x'; 128 << 10]);
    }
    log.append(LogStream::Stdout, b"\nlast");
    let sizes: Vec<u64> =
        std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).collect();
    assert!(sizes.len() == 2 && sizes.iter().all(|s| *s <= FILE + (LONGEST + HEADER) as u64), "{sizes:?}");
    assert_eq!(log.offset(), (200 * (128 << 10) + 5) as u64);
    let query = LogQuery { tail: Some(1), ..LogQuery::default() };
    assert_eq!(read(directory.path(), query).await, "last");
}

#[tokio::test]
async fn a_half_written_frame_is_cut_off_and_the_position_is_known_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut log = writer(directory.path());
    log.append(LogStream::Stdout, b"whole ");
    log.append(LogStream::Stdout, b"half");
    drop(log);
    let path = file(directory.path(), 0);
    let size = std::fs::metadata(&path).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(size - 1).unwrap();
    let mut log = writer(directory.path());
    assert_eq!(log.offset(), 6);
    log.append(LogStream::Stdout, b"again");
    assert_eq!(read(directory.path(), LogQuery::default()).await, "whole again");
}

#[tokio::test]
async fn the_last_lines_are_counted_across_pieces() {
    let directory = tempfile::tempdir().unwrap();
    let mut log = writer(directory.path());
    for piece in ["a\nb", "b\nc", "\n", "d"] {
        log.append(LogStream::Stdout, piece.as_bytes());
    }
    for (lines, text) in [(0, ""), (1, "d"), (2, "c\nd"), (3, "bb\nc\nd"), (9, "a\nbb\nc\nd")] {
        let query = LogQuery { tail: Some(lines), ..LogQuery::default() };
        assert_eq!(read(directory.path(), query).await, text, "{lines}");
    }
}

#[tokio::test]
async fn a_follower_gets_what_comes_later_and_ends_with_the_writer() {
    let directory = tempfile::tempdir().unwrap();
    let grown = Arc::new(watch::channel(0).0);
    let mut log = LogWriter::open(directory.path(), Arc::clone(&grown)).unwrap();
    log.append(LogStream::Stdout, b"early ");
    let query = LogQuery { end: LogEnd::Follow, ..LogQuery::default() };
    let mut reader = LogReader::open(directory.path(), query, Some(grown.subscribe())).unwrap();
    assert_eq!(reader.next().await.unwrap().unwrap().data, b"early ");
    let follower = tokio::spawn(async move { all(&mut reader).await });
    for _ in 0..100 {
        log.append(LogStream::Stderr, &[b'y'; 100 << 10]);
        tokio::task::yield_now().await;
    }
    log.append(LogStream::Stdout, b"end");
    drop((log, grown));
    assert!(follower.await.unwrap().ends_with(b"yend"));
}

#[tokio::test]
async fn only_what_is_new_enough_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let mut log = writer(directory.path());
    log.append(LogStream::Stdout, b"old");
    let mut reader = LogReader::open(directory.path(), LogQuery::default(), None).unwrap();
    let since = reader.next().await.unwrap().unwrap().at + Duration::from_nanos(1);
    log.append(LogStream::Stdout, b"new");
    let query = LogQuery { since: Some(since), ..LogQuery::default() };
    assert_eq!(read(directory.path(), query).await, "new");
}

#[tokio::test]
async fn a_damaged_log_is_an_error_not_a_flood() {
    let directory = tempfile::tempdir().unwrap();
    let mut open = std::fs::File::create(file(directory.path(), 0)).unwrap();
    open.write_all(&[0xff; 4096]).unwrap();
    let mut reader = LogReader::open(directory.path(), LogQuery::default(), None).unwrap();
    assert!(matches!(reader.next().await, Err(Error::Damaged { position: 0, .. })));
}

#[tokio::test]
async fn entries_say_where_they_stand_and_can_be_cut_there() {
    let directory = tempfile::tempdir().unwrap();
    let mut log = writer(directory.path());
    log.append(LogStream::Stdout, b"one");
    log.skip(10);
    log.append(LogStream::Stderr, b"two");
    let mut reader = LogReader::open(directory.path(), LogQuery::default(), None).unwrap();
    let (one, two) = (reader.next().await.unwrap().unwrap(), reader.next().await.unwrap().unwrap());
    assert_eq!((one.offset, two.offset), (0, 13));
    assert_eq!(one.clone().from_offset(0), Some(one.clone()));
    assert_eq!(one.clone().from_offset(2).map(|rest| (rest.offset, rest.data)), Some((2, b"e".to_vec())));
    assert_eq!(one.from_offset(3), None);
    assert_eq!(two.clone().from_offset(7), Some(two.clone()));
    assert_eq!(two.from_offset(100), None);
}
