//! The life of a husk: takes its workdir, finds or makes its machine, and serves its socket until it is told to end or must.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use imp_runtime::spec::BridgeSettings;
use imp_runtime::{Config, DriverChoice, Runtime};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::husk::{Deadline, Husk, longest};
use crate::layout::{self, Layout};
use crate::protocol::{Id, Op, Prepare};
use crate::refusal::Refusal;
use crate::{adopt, connection, end, fork};

/// Connections at once: those of one controller, and of whoever looks.
const CONNECTIONS: usize = 16;
/// How long answers under way may take when the husk ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long there must have been no client before memory is given back.
const REST: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) layout: Layout,
    /// Imp's data directory, whose templates and kernels are used.
    pub(crate) data: Option<PathBuf>,
    pub(crate) socket: PathBuf,
    pub(crate) vm: Id,
    pub(crate) guest_agent: PathBuf,
    pub(crate) driver: DriverChoice,
    pub(crate) firecracker: Option<PathBuf>,
    pub(crate) qemu: Option<PathBuf>,
    /// Done before anybody is served.
    pub(crate) prepare: Option<Prepare>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Layout(#[from] layout::Error),
    #[error("the workdir cannot be taken")]
    Runtime(#[source] Box<imp_runtime::Error>),
    #[error(transparent)]
    Adopt(#[from] adopt::Error),
    #[error("what a husk before has left of a fork cannot be removed")]
    Forks(#[source] Box<Refusal>),
    #[error("the machine was not prepared")]
    NotPrepared(#[source] Box<Refusal>),
    #[error("{} is in use by another process: choose another --control-socket", path.display())]
    SocketInUse { path: PathBuf },
    #[error("{} is there and is no socket", path.display())]
    NotASocket { path: PathBuf },
    #[error("cannot listen on {}; its whole path may have 107 bytes", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("signals cannot be received")]
    Signals(#[source] io::Error),
}

/// Why a husk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Told,
    /// Its machine could not be trusted any more.
    Broken,
}

pub(crate) async fn serve(settings: Settings) -> Result<Why, Error> {
    let mut told = Told::listen().map_err(Error::Signals)?;
    let husk = tokio::select! {
        husk = open(&settings) => husk?,
        // The next start finds what there is.
        () = told.come() => return Ok(Why::Told),
    };
    if let (Some(prepare), None) = (settings.prepare, husk.machine()) {
        let deadline = Deadline::from(Instant::now(), None, longest(Op::Prepare));
        let prepared = tokio::select! {
            prepared = husk.prepare(prepare, deadline) => prepared.map_err(Some),
            () = told.come() => Err(None),
        };
        if let Err(refusal) = prepared {
            end::end(&husk, end::How::AtOnce).await;
            return refusal.map_or(Ok(Why::Told), |refusal| Err(Error::NotPrepared(Box::new(refusal))));
        }
    }
    let listener = match listen(&settings.socket).await {
        Ok(listener) => listener,
        Err(error) => {
            end::end(&husk, end::How::AtOnce).await;
            return Err(error);
        }
    };
    tracing::info!(socket = %settings.socket.display(), "serving control socket");
    let (why, mut clients) = until_the_end(&listener, &husk, &mut told).await;
    drop(listener);
    let _ = std::fs::remove_file(&settings.socket);
    // What is under way is told how it ended.
    let _ = timeout(LAST_WORDS, async { while clients.join_next().await.is_some() {} }).await;
    clients.shutdown().await;
    let how = match why {
        Why::Told => end::How::Orderly,
        Why::Broken => end::How::AtOnce,
    };
    end::end(&husk, how).await;
    Ok(why)
}

async fn open(settings: &Settings) -> Result<Arc<Husk>, Error> {
    let layout = settings.layout.clone();
    layout.make()?;
    if let Some(data) = &settings.data {
        layout.share(data)?;
    }
    let runtime = Runtime::open(Config {
        data: layout.workdir.clone(),
        runtime: layout.runtime.clone(),
        guest_agent: settings.guest_agent.clone(),
        driver: settings.driver,
        firecracker: settings.firecracker.clone(),
        qemu: settings.qemu.clone(),
        bridge: BridgeSettings::default(),
    })
    .await
    .map_err(|error| Error::Runtime(Box::new(error)))?;
    let wanted = settings.prepare.as_ref().and_then(|prepare| prepare.snapshot.expected);
    let machine = adopt::adopt(&runtime, &settings.vm, wanted).await?;
    let forks = fork::repair(&runtime, &layout, machine.as_ref().map(|(id, _)| id)).await;
    let forks = forks.map_err(|refusal| Error::Forks(Box::new(refusal)))?;
    if let Some((id, machine)) = &machine {
        tracing::info!(vm = %id, ?machine, "goes on from the husk before");
    }
    Ok(Husk::new(runtime, layout, settings.vm.clone(), machine, forks))
}

async fn until_the_end(listener: &UnixListener, husk: &Arc<Husk>, told: &mut Told) -> (Why, JoinSet<()>) {
    let mut clients = JoinSet::new();
    let mut has_rested = false;
    let why = loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    has_rested = false;
                    let room = clients.len() < CONNECTIONS;
                    clients.spawn(client(stream, room, Arc::clone(husk)));
                }
                Err(error) => {
                    tracing::error!(%error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = clients.join_next() => {}
            () = tokio::time::sleep(REST), if clients.is_empty() && !has_rested => {
                has_rested = true;
                rest();
            }
            () = husk.ending.cancelled() => break Why::Broken,
            () = told.come() => {
                husk.end();
                break Why::Told;
            }
        }
    };
    (why, clients)
}

async fn client(mut stream: UnixStream, room: bool, husk: Arc<Husk>) {
    let refused = match stream.peer_cred() {
        Ok(peer) => is_welcome(peer.uid(), room).err(),
        Err(_) => Some(Refusal::Stranger { uid: u32::MAX }),
    };
    match refused {
        // Before a byte of it was read.
        Some(refusal) => {
            tracing::warn!(%refusal, "a client was sent away");
            let _ = connection::write(&mut stream, &refusal.answer()).await;
        }
        None => connection::serve(stream, husk).await,
    }
}

fn is_welcome(uid: u32, room: bool) -> Result<(), Refusal> {
    if uid != rustix::process::geteuid().as_raw() {
        return Err(Refusal::Stranger { uid });
    }
    if room { Ok(()) } else { Err(Refusal::TooMany) }
}

/// Nobody but this user may connect. A socket on which nobody listens was left by a husk that was killed.
async fn listen(path: &Path) -> Result<UnixListener, Error> {
    let failed = |source| Error::Listen { path: path.to_owned(), source };
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.file_type().is_socket() => {
            return Err(Error::NotASocket { path: path.to_owned() });
        }
        Ok(_) if UnixStream::connect(path).await.is_ok() => {
            return Err(Error::SocketInUse { path: path.to_owned() });
        }
        Ok(_) => std::fs::remove_file(path).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    // Made for this user alone: the umask of this process lets nobody else.
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Gives back what only start and requests needed.
fn rest() {
    imp_sys::heap::give_back();
    if let Err(error) = imp_sys::code::let_go() {
        tracing::debug!(%error, "the pages of the program stay");
    }
}

/// The signals that end a husk.
struct Told {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Told {
    fn listen() -> io::Result<Self> {
        let (terminate, interrupt) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self { terminate: signal(terminate)?, interrupt: signal(interrupt)? })
    }

    async fn come(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_users_process_is_a_stranger_and_there_is_a_limit() {
        let own = rustix::process::geteuid().as_raw();
        assert!(is_welcome(own, true).is_ok());
        assert!(matches!(is_welcome(own + 1, true), Err(Refusal::Stranger { .. })));
        assert!(matches!(is_welcome(own, false), Err(Refusal::TooMany)));
    }

    #[tokio::test]
    async fn a_socket_is_its_users_alone_is_taken_over_when_it_is_stale_and_from_nobody_who_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let first = listen(&path).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&path).await, Err(Error::SocketInUse { .. })));
        drop(first);
        drop(listen(&path).await.unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, b"kept").unwrap();
        assert!(matches!(listen(&path).await, Err(Error::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"kept");
    }
}
