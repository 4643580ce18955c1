//! Changes below a path, by inotify.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use imp_protocol::guest::watch_event::Kind;
use imp_protocol::guest::{WatchEvent, WatchRequest};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

use crate::files::{self, Error, path_of};
use crate::readiness;

const WATCHED: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DONT_FOLLOW);
/// Bytes of events that are read at once.
const READ: usize = 16 << 10;
/// Events that wait for a host that does not read; the kernel keeps its own queue behind them.
const WAITING: usize = 64;

pub(crate) async fn serve(
    request: WatchRequest,
) -> Result<Response<ReceiverStream<Result<WatchEvent, Status>>>, Status> {
    let path = path_of(&request.path)?;
    let depth = if request.recursive { Depth::All } else { Depth::One };
    let (mut watches, inotify) = files::work(move || {
        // The path itself may be a link; below it, links are not followed.
        let path = fs::canonicalize(&path).map_err(Error::file("cannot watch", &path))?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(Error::errno("cannot watch", &path))?;
        let mut watches = Watches { depth, paths: HashMap::new(), top: path.clone() };
        watches.add_tree(&inotify, &path, &mut Vec::new())?;
        Ok((watches, inotify))
    })
    .await?;
    let inotify = readiness::readable(inotify);
    let inotify = inotify.map_err(|error| Status::resource_exhausted(format!("cannot watch: {error}")))?;
    let (events, stream) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        let started = WatchEvent { kind: Kind::Started.into(), ..Default::default() };
        let mut batch = vec![started];
        loop {
            for event in batch.drain(..) {
                if events.send(Ok(event)).await.is_err() {
                    return;
                }
            }
            let mut ready = tokio::select! {
                ready = inotify.readable() => match ready {
                    Ok(ready) => ready,
                    Err(_) => return,
                },
                () = events.closed() => return,
            };
            match watches.read(&inotify, &mut batch) {
                Ok(()) => {}
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(error) => {
                    let _ = events.send(Err(Status::internal(format!("the watch ended: {error}")))).await;
                    return;
                }
            }
        }
    });
    Ok(Response::new(ReceiverStream::new(stream)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    One,
    All,
}

#[derive(Debug)]
struct Watches {
    depth: Depth,
    /// Path of each watched file or directory, by the kernel's number for the watch.
    paths: HashMap<i32, PathBuf>,
    top: PathBuf,
}

impl Watches {
    /// Watches `top`, and with `Depth::All` the directories below it; `found` gets what is there already.
    fn add_tree(&mut self, inotify: &OwnedFd, top: &Path, found: &mut Vec<PathBuf>) -> Result<(), Error> {
        let mut directories = vec![top.to_owned()];
        while let Some(path) = directories.pop() {
            match inotify::add_watch(inotify, &path, WATCHED) {
                Ok(watch) => drop(self.paths.insert(watch, path.clone())),
                // Removed meanwhile.
                Err(Errno::NOENT | Errno::NOTDIR) if path != top => continue,
                Err(error) => {
                    return Err(Error::errno("cannot watch (see fs.inotify.max_user_watches)", &path)(error));
                }
            }
            if self.depth == Depth::One {
                break;
            }
            for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
                found.push(entry.path());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    directories.push(entry.path());
                }
            }
        }
        Ok(())
    }

    /// Reads one buffer of events.
    fn read(&mut self, inotify: &AsyncFd<OwnedFd>, events: &mut Vec<WatchEvent>) -> Result<(), Errno> {
        let mut buffer = [MaybeUninit::uninit(); READ];
        let mut reader = inotify::Reader::new(inotify.get_ref(), &mut buffer);
        let mut moved: Option<(u32, PathBuf)> = None;
        loop {
            let event = reader.next()?;
            let (flags, cookie) = (event.events(), event.cookie());
            let path = self.paths.get(&event.wd()).map(|directory| match event.file_name() {
                Some(name) => directory.join(OsStr::from_bytes(name.to_bytes())),
                None => directory.clone(),
            });
            let watch = event.wd();
            let is_last = reader.is_buffer_empty();
            // The other half of a move stands right behind the first, or there is none: it left what is watched.
            if let Some((first, from)) = moved.take() {
                if flags.contains(ReadFlags::MOVED_TO) && first == cookie {
                    if let Some(to) = path {
                        self.renamed(&from, &to);
                        events.push(happened(Kind::Renamed, &from, Some(&to)));
                    }
                    if is_last {
                        return Ok(());
                    }
                    continue;
                }
                events.push(happened(Kind::Removed, &from, None));
            }
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                events.push(happened(Kind::Overflow, &self.top.clone(), None));
                let _ = self.add_tree(inotify.get_ref(), &self.top.clone(), &mut Vec::new());
            } else if flags.contains(ReadFlags::IGNORED) {
                self.paths.remove(&watch);
            } else if let Some(path) = path {
                let kind = match flags {
                    _ if flags.contains(ReadFlags::MOVED_FROM) => {
                        moved = Some((cookie, path));
                        None
                    }
                    _ if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) => {
                        self.appeared(inotify.get_ref(), path, flags, events);
                        None
                    }
                    _ if flags.contains(ReadFlags::DELETE) => Some((Kind::Removed, path)),
                    // Of a directory below the top, its own directory tells the same.
                    _ if flags.contains(ReadFlags::DELETE_SELF) => {
                        (path == self.top).then_some((Kind::Removed, path))
                    }
                    _ if flags.intersects(ReadFlags::MODIFY | ReadFlags::CLOSE_WRITE) => {
                        Some((Kind::Modified, path))
                    }
                    _ if flags.contains(ReadFlags::ATTRIB) => Some((Kind::Attributes, path)),
                    _ => None,
                };
                if let Some((kind, path)) = kind {
                    let event = happened(kind, &path, None);
                    // A file that is written in many pieces is told of once for each batch.
                    if events.last() != Some(&event) {
                        events.push(event);
                    }
                }
            }
            if is_last {
                if let Some((_, from)) = moved {
                    events.push(happened(Kind::Removed, &from, None));
                }
                return Ok(());
            }
        }
    }

    fn appeared(&mut self, inotify: &OwnedFd, path: PathBuf, flags: ReadFlags, events: &mut Vec<WatchEvent>) {
        events.push(happened(Kind::Created, &path, None));
        if self.depth == Depth::All && flags.contains(ReadFlags::ISDIR) {
            // What was put into it before it was watched would go untold. Some of it may be told twice.
            let mut found = Vec::new();
            if self.add_tree(inotify, &path, &mut found).is_err() {
                events.push(happened(Kind::Overflow, &path, None));
            }
            events.extend(found.iter().map(|path| happened(Kind::Created, path, None)));
        }
    }

    /// Watches stay with what they watch, whatever it is called.
    fn renamed(&mut self, from: &Path, to: &Path) {
        for path in self.paths.values_mut() {
            if let Ok(below) = path.strip_prefix(from) {
                *path = if below.as_os_str().is_empty() { to.to_owned() } else { to.join(below) };
            }
        }
    }
}

fn happened(kind: Kind, path: &Path, to: Option<&Path>) -> WatchEvent {
    let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec().into();
    WatchEvent { kind: kind.into(), path: bytes(path), to: to.map(bytes).unwrap_or_default() }
}
