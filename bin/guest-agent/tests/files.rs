//! The agent's services for files, watches and ports over a real connection, in temporary directories.

mod agent;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use bytes::Bytes;
use imp_protocol::guest::file_stat::Kind;
use imp_protocol::guest::watch_event::Kind as Event;
use imp_protocol::guest::{
    Attributes, ListFilesRequest, MoveRequest, OpenArchive, OpenForWrite, OpenPort, ReadArchiveRequest,
    ReadFileRequest, RemoveRequest, StatRequest, WatchRequest, WriteArchiveInput, WriteArchiveResponse,
    WriteFileInput, forward_input, forward_output, write_archive_input, write_file_input,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use self::agent::Host;

fn bytes(path: &Path) -> Bytes {
    Bytes::copy_from_slice(path.as_os_str().as_bytes())
}

fn open(path: &Path) -> WriteFileInput {
    let attributes =
        Some(Attributes { mode: Some(0o4711), uid: Some(7), gid: Some(8), modified_nanoseconds: Some(5) });
    let open = OpenForWrite { path: bytes(path), attributes, make_parents: true, append: false };
    WriteFileInput { input: Some(write_file_input::Input::Open(open)) }
}

fn data(data: &[u8]) -> WriteFileInput {
    WriteFileInput { input: Some(write_file_input::Input::Data(Bytes::copy_from_slice(data))) }
}

async fn read(host: &Host, path: &Path, offset: u64, length: u64) -> Result<Vec<u8>, Status> {
    let mut stream =
        host.files().read(ReadFileRequest { path: bytes(path), offset, length }).await?.into_inner();
    let mut content = Vec::new();
    while let Some(chunk) = stream.message().await? {
        content.extend_from_slice(&chunk.data);
    }
    Ok(content)
}

#[tokio::test]
async fn a_file_goes_in_and_comes_out_with_its_attributes() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let path = directory.path().join("a/b/file");
    let content: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut inputs = vec![open(&path)];
    inputs.extend(content.chunks(300_000).map(data));
    let answer = host.files().write(tokio_stream::iter(inputs)).await.unwrap();
    assert_eq!(answer.into_inner().size, content.len() as u64);
    assert!(read(&host, &path, 0, 0).await.unwrap() == content);
    assert!(read(&host, &path, 10, 300_000).await.unwrap() == content[10..300_010]);
    let stat = host.files().stat(StatRequest { path: bytes(&path), follow_links: false }).await.unwrap();
    let stat = stat.into_inner().stat.unwrap();
    assert_eq!(
        (stat.kind(), stat.mode, stat.uid, stat.gid, stat.modified_nanoseconds),
        (Kind::File, 0o4711, 7, 8, 5)
    );
}

#[tokio::test]
async fn a_broken_write_leaves_the_old_file_and_nothing_else() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let path = directory.path().join("file");
    fs::write(&path, "old").unwrap();
    let (sender, inputs) = tokio::sync::mpsc::channel(4);
    sender.send(open(&path)).await.unwrap();
    sender.send(data(b"new")).await.unwrap();
    let mut files = host.files();
    let write = tokio::spawn(async move { files.write(ReceiverStream::new(inputs)).await });
    agent::until(|| fs::read_dir(directory.path()).unwrap().count() == 2).await;
    write.abort();
    agent::until(|| fs::read_dir(directory.path()).unwrap().count() == 1).await;
    assert_eq!(fs::read_to_string(&path).unwrap(), "old");
}

#[tokio::test]
async fn errors_have_the_code_that_fits() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let code = async |path: &Path| read(&host, path, 0, 0).await.unwrap_err().code();
    assert_eq!(code(&directory.path().join("missing")).await, Code::NotFound);
    assert_eq!(code(Path::new("relative")).await, Code::InvalidArgument);
    assert_eq!(code(directory.path()).await, Code::FailedPrecondition);
    fs::create_dir(directory.path().join("full")).unwrap();
    fs::write(directory.path().join("full/x"), "").unwrap();
    let remove = |name: &str, recursive, missing_is_fine| {
        let path = bytes(&directory.path().join(name));
        let mut files = host.files();
        async move {
            files
                .remove(RemoveRequest { path, recursive, missing_is_fine })
                .await
                .map_err(|status| status.code())
        }
    };
    assert_eq!(remove("full", false, false).await.unwrap_err(), Code::FailedPrecondition);
    assert_eq!(remove("none", true, false).await.unwrap_err(), Code::NotFound);
    remove("none", true, true).await.unwrap();
    remove("full", true, false).await.unwrap();
    assert!(!directory.path().join("full").exists());
}

#[tokio::test]
async fn a_directory_is_listed_and_moved_also_to_another_file_system() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let from = directory.path().join("from");
    fs::create_dir(&from).unwrap();
    fs::write(from.join("a"), "content").unwrap();
    symlink("a", from.join("b")).unwrap();
    let request = ListFilesRequest { path: bytes(&from) };
    let batch = host.files().list(request).await.unwrap().into_inner().message().await.unwrap().unwrap();
    let seen: Vec<_> =
        batch.entries.iter().map(|entry| (&entry.path[..], entry.kind(), &entry.link_target[..])).collect();
    assert_eq!(seen, [(&b"a"[..], Kind::File, &b""[..]), (b"b", Kind::Symlink, b"a")]);
    let to = other.path().join("to");
    let request = MoveRequest { from: bytes(&from), to: bytes(&to), overwrite: false };
    host.files().r#move(request.clone()).await.unwrap();
    assert!(!from.exists());
    assert_eq!(fs::read_to_string(to.join("b")).unwrap(), "content");
    fs::create_dir(&from).unwrap();
    assert_eq!(host.files().r#move(request).await.unwrap_err().code(), Code::AlreadyExists);
}

async fn unpack(host: &Host, path: &Path, archive: &[u8]) -> Result<WriteArchiveResponse, Status> {
    let open = OpenArchive { path: bytes(path), ..Default::default() };
    let mut inputs = vec![WriteArchiveInput { input: Some(write_archive_input::Input::Open(open)) }];
    inputs.extend(archive.chunks(1000).map(|data| WriteArchiveInput {
        input: Some(write_archive_input::Input::Data(Bytes::copy_from_slice(data))),
    }));
    Ok(host.files().write_archive(tokio_stream::iter(inputs)).await?.into_inner())
}

#[tokio::test]
async fn a_hole_of_an_archive_takes_no_room_and_no_time_after_its_sender_has_left() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let small = directory.path().join("small");
    let file = fs::File::create(&small).unwrap();
    file.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"end", (64 << 20) - 3).unwrap();
    // The library writes what is sparse as what it is.
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_path_with_name(&small, "small").unwrap();
    let archive = builder.into_inner().unwrap();
    assert!(archive.len() < 1 << 20, "{} bytes: the archive is not sparse", archive.len());
    let to = directory.path().join("to");
    unpack(&host, &to, &archive).await.unwrap();
    let unpacked = fs::read(to.join("small")).unwrap();
    assert!(unpacked.len() == 64 << 20 && unpacked.ends_with(b"\0end"));
    assert!(fs::metadata(to.join("small")).unwrap().blocks() * 512 < 1 << 20);

    // Zeros that would take hours, from a host that has left.
    fs::File::options().write(true).open(&small).unwrap().set_len(1 << 43).unwrap();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_path_with_name(&small, "large").unwrap();
    let archive = builder.into_inner().unwrap();
    let mut call = Box::pin(unpack(&host, &to, &archive));
    // It gets its name when it is whole: only a descriptor shows it.
    let open = || {
        fs::read_dir("/proc/self/fd")
            .unwrap()
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|open| open.parent() == Some(to.as_path())))
    };
    while !open() {
        tokio::select! {
            ended = &mut call => panic!("it cannot be unpacked yet: {ended:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
    drop(call);
    while open() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_tree_survives_the_way_out_and_in_again() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    let long = from.join("d".repeat(90)).join("n".repeat(120));
    fs::create_dir_all(long.parent().unwrap()).unwrap();
    fs::write(&long, vec![3; 700_001]).unwrap();
    fs::hard_link(&long, from.join("hard")).unwrap();
    symlink("x".repeat(150), from.join("link")).unwrap();
    std::os::unix::fs::chown(from.join("hard"), Some(3_000_000_000), Some(5)).unwrap();
    rustix::fs::setxattr(from.join("hard"), "user.note", b"value", rustix::fs::XattrFlags::empty()).unwrap();
    let request = ReadArchiveRequest { path: bytes(&from), ..Default::default() };
    let mut stream = host.files().read_archive(request).await.unwrap().into_inner();
    let mut archive = Vec::new();
    while let Some(chunk) = stream.message().await.unwrap() {
        archive.extend_from_slice(&chunk.data);
    }
    assert_eq!(unpack(&host, &to, &archive).await.unwrap().bytes, 700_001);
    let (hard, name) = (fs::metadata(to.join("hard")).unwrap(), to.join(long.strip_prefix(&from).unwrap()));
    assert_eq!((hard.uid(), hard.gid(), hard.len()), (3_000_000_000, 5, 700_001));
    assert_eq!(fs::metadata(name).unwrap().ino(), hard.ino());
    assert_eq!(hard.mtime_nsec(), fs::metadata(&long).unwrap().mtime_nsec());
    assert_eq!(fs::read_link(to.join("link")).unwrap().as_os_str().len(), 150);
    let mut value = [0; 16];
    assert_eq!(rustix::fs::getxattr(to.join("hard"), "user.note", &mut value[..]).unwrap(), 5);
}

#[expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "part of a test, though not a test function"
)]
fn member(archive: &mut tar::Builder<Vec<u8>>, kind: tar::EntryType, name: &str, link: &str, content: &[u8]) {
    let mut header = tar::Header::new_ustar();
    header.as_ustar_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(kind);
    header.set_link_name_literal(link).unwrap();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_cksum();
    archive.append(&header, content).unwrap();
}

#[tokio::test]
async fn no_member_of_an_archive_leaves_its_directory() {
    use tar::EntryType::{Link, Regular, Symlink};
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let (inside, outside) = (directory.path().join("in"), directory.path().join("out"));
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    let mut archive = tar::Builder::new(Vec::new());
    member(&mut archive, tar::EntryType::Directory, "out", "", b"");
    member(&mut archive, Symlink, "up", "../out", b"");
    member(&mut archive, Regular, "up/good", "", b"good");
    member(&mut archive, Symlink, "root", outside.to_str().unwrap(), b"");
    unpack(&host, &inside, &archive.into_inner().unwrap()).await.unwrap();
    assert_eq!(fs::read_to_string(inside.join("out/good")).unwrap(), "good");
    let mut archive = tar::Builder::new(Vec::new());
    member(&mut archive, Regular, "root/evil", "", b"evil");
    unpack(&host, &inside, &archive.into_inner().unwrap()).await.unwrap_err();
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    for (kind, name, link) in
        [(Regular, "../evil", ""), (Link, "hard", "../out/secret"), (Link, "hard", "root/secret")]
    {
        let mut archive = tar::Builder::new(Vec::new());
        member(&mut archive, kind, name, link, b"");
        assert!(unpack(&host, &inside, &archive.into_inner().unwrap()).await.is_err(), "{name} {link}");
    }
    assert!(!inside.join("hard").exists() && !directory.path().join("evil").exists());
    assert_eq!(unpack(&host, &inside, &[1; 2048]).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn an_archive_that_ends_between_two_members_is_not_taken_for_a_whole_one() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let mut archive = tar::Builder::new(Vec::new());
    member(&mut archive, tar::EntryType::Regular, "a", "", b"a");
    member(&mut archive, tar::EntryType::Regular, "b", "", b"b");
    let whole = archive.into_inner().unwrap();
    let refused = unpack(&host, directory.path(), &whole[..1024]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("no end"), "{refused}");
    assert_eq!(unpack(&host, directory.path(), &whole).await.unwrap().entries, 2);
}

#[tokio::test]
async fn a_large_member_takes_the_place_of_a_file_when_it_is_whole_and_keeps_a_time_before_1970() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let path = directory.path().join("large");
    fs::write(&path, "old").unwrap();
    let content = vec![7; 3_000_000];
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o640);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime((-7_i64).cast_unsigned());
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_data(&mut header, "large", &content[..]).unwrap();
    let whole = archive.into_inner().unwrap();
    unpack(&host, directory.path(), &whole[..2_000_000]).await.unwrap_err();
    assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    unpack(&host, directory.path(), &whole).await.unwrap();
    let large = fs::metadata(&path).unwrap();
    assert_eq!((large.len(), large.mode() & 0o777, large.mtime()), (3_000_000, 0o640, -7));
}

#[tokio::test]
async fn a_file_that_is_sparse_in_the_way_of_pax_is_refused_by_name() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_pax_extensions([("GNU.sparse.major", &b"1"[..]), ("GNU.sparse.minor", b"0")]).unwrap();
    member(&mut archive, tar::EntryType::Regular, "holes", "", b"1\n0\n1\n");
    let refused = unpack(&host, directory.path(), &archive.into_inner().unwrap()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("holes") && refused.message().contains("--sparse"), "{refused}");
    assert!(!directory.path().join("holes").exists());
}

#[tokio::test]
async fn a_watch_tells_what_happens_below_its_path() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let top = fs::canonicalize(directory.path()).unwrap();
    let request = WatchRequest { path: bytes(&top), recursive: true };
    let mut events = host.files().watch(request).await.unwrap().into_inner();
    assert_eq!(events.message().await.unwrap().unwrap().kind(), Event::Started);
    let mut expect = async |kind: Event, path: &Path, to: &[u8]| loop {
        let event = events.message().await.unwrap().unwrap();
        if (event.kind(), &event.path[..], &event.to[..]) == (kind, path.as_os_str().as_bytes(), to) {
            return;
        }
    };
    let (deep, file) = (top.join("a/b"), top.join("a/b/file"));
    fs::create_dir_all(&deep).unwrap();
    expect(Event::Created, &deep, b"").await;
    fs::write(&file, "x").unwrap();
    expect(Event::Modified, &file, b"").await;
    fs::rename(&file, top.join("moved")).unwrap();
    expect(Event::Renamed, &file, top.join("moved").as_os_str().as_bytes()).await;
    fs::remove_file(top.join("moved")).unwrap();
    expect(Event::Removed, &top.join("moved"), b"").await;
}

#[tokio::test]
async fn a_port_is_forwarded_with_each_direction_closed_apart() {
    let host = Host::connect().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = u32::from(listener.local_addr().unwrap().port());
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut asked = Vec::new();
        stream.read_to_end(&mut asked).await.unwrap();
        stream.write_all(&asked).await.unwrap();
    });
    let open = |port| forward_input::Input::Open(OpenPort { port, address: String::new() });
    let message = |input| imp_protocol::guest::ForwardInput { input: Some(input) };
    let content = vec![b'x'; 3_000_000];
    let mut inputs = vec![message(open(port))];
    inputs.extend(
        content.chunks(100_000).map(|data| message(forward_input::Input::Data(Bytes::copy_from_slice(data)))),
    );
    inputs.push(message(forward_input::Input::ShutDownWrite(imp_protocol::guest::CloseStdin {})));
    let mut outputs = host.ports().forward(tokio_stream::iter(inputs)).await.unwrap().into_inner();
    let first = outputs.message().await.unwrap().unwrap().output;
    assert!(matches!(first, Some(forward_output::Output::Opened(_))));
    let mut back = Vec::new();
    while let Some(output) = outputs.message().await.unwrap() {
        if let Some(forward_output::Output::Data(data)) = output.output {
            back.extend_from_slice(&data);
        }
    }
    assert!(back == content);
    server.await.unwrap();
    for (port, code) in
        [(0, Code::InvalidArgument), (65_536, Code::InvalidArgument), (port, Code::Unavailable)]
    {
        let refused = host.ports().forward(tokio_stream::iter([message(open(port))])).await;
        assert_eq!(refused.unwrap_err().code(), code, "{port}");
    }
}

#[tokio::test]
async fn attributes_after_an_append_are_those_of_the_file_that_was_appended_to() {
    let (host, directory) = (Host::connect().await, tempfile::tempdir().unwrap());
    let (path, moved) = (directory.path().join("file"), directory.path().join("moved"));
    fs::write(&path, "old").unwrap();
    let mut opened = open(&path);
    if let Some(write_file_input::Input::Open(open)) = &mut opened.input {
        open.append = true;
    }
    let (sender, inputs) = tokio::sync::mpsc::channel(4);
    sender.send(opened).await.unwrap();
    sender.send(data(b"new")).await.unwrap();
    let mut files = host.files();
    let write = tokio::spawn(async move { files.write(ReceiverStream::new(inputs)).await });
    agent::until(|| fs::read(&path).unwrap() == b"oldnew").await;
    fs::rename(&path, &moved).unwrap();
    fs::write(&path, "another").unwrap();
    drop(sender);
    assert_eq!(write.await.unwrap().unwrap().into_inner().size, 6);
    let facts = |path: &Path| fs::metadata(path).map(|file| (file.mode() & 0o7777, file.uid())).unwrap();
    assert_eq!(facts(&moved), (0o4711, 7));
    assert_eq!(facts(&path).1, 0);
}
