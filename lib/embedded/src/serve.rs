//! The life of an owner: takes the lock, adopts what lives, serves until it is idle or told to end.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use imp_protocol::connection;
use imp_protocol::runtime::pools_server::PoolsServer;
use imp_protocol::runtime::runtime_server::RuntimeServer;
use imp_protocol::runtime::snapshots_server::SnapshotsServer;
use imp_runtime::spec::BridgeSettings;
use imp_runtime::{Config, DriverChoice, Runtime};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::Routes;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::caller::is_user;
use crate::client::Identity;
use crate::layout::{Layout, make_private};
use crate::log::BoundedLog;
use crate::pools::{self, Pools};
use crate::server::{self, Server};
use crate::template_names::TemplateNames;
use crate::under_way::UnderWay;
use crate::{idle, lane, proxy};

/// How long a client may stay silent after it has connected.
const FIRST_WORD: Duration = Duration::from_secs(10);
/// How long answers under way may take when the owner ends.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How an owner is to behave.
#[derive(Debug, Clone)]
pub struct Settings {
    pub layout: Layout,
    pub guest_agent: PathBuf,
    /// What new VMs run in.
    pub driver: DriverChoice,
    /// Absent: the one in PATH, beside the program, or in ../libexec/imp.
    pub firecracker: Option<PathBuf>,
    /// Absent: the one in PATH.
    pub qemu: Option<PathBuf>,
    pub bridge: BridgeSettings,
    /// How long it stays when nobody needs it.
    pub idle_after: Duration,
    pub identity: Identity,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else is the owner.
    #[error("another process owns the VMs of {0}")]
    Owned(PathBuf),
    #[error("cannot use {path}")]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write the log {path}")]
    Log {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot take the lock {path}")]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot listen on {path}; its whole path may have 107 bytes: set IMP_RUNTIME_DIR to a shorter directory"
    )]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the VMs cannot be taken over")]
    Runtime(#[from] Box<imp_runtime::Error>),
    #[error("the pools cannot be taken over")]
    Pools(#[from] pools::Error),
    #[error("signals cannot be received")]
    Signals(#[source] io::Error),
}

/// Writes what this process has to say to the owner's log. `filter`: a level, or levels of modules
/// as in `info,imp_runtime=debug`.
pub fn log_to_file(layout: &Layout, filter: &str) -> Result<(), Error> {
    prepare(layout)?;
    let path = layout.log();
    let log = BoundedLog::open(&path).map_err(|source| Error::Log { path, source })?;
    let filter: Targets = filter.parse().unwrap_or_else(|_| Targets::new().with_default(LevelFilter::INFO));
    let lines =
        tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_ansi(false).with_writer(log);
    // An error says that a log is set up already, which only a test does.
    let _ = lines.finish().with(filter).try_init();
    Ok(())
}

/// Serves until idle or told to end. VMs go on without their owner. Calls `ready` once clients are served.
pub async fn serve(settings: Settings, ready: impl FnOnce()) -> Result<(), Error> {
    let layout = &settings.layout;
    prepare(layout)?;
    let _lock = lock(layout)?;
    let runtime = Runtime::open(Config {
        data: layout.data.clone(),
        runtime: layout.runtime.clone(),
        guest_agent: settings.guest_agent.clone(),
        driver: settings.driver,
        firecracker: settings.firecracker.clone(),
        qemu: settings.qemu.clone(),
        bridge: settings.bridge.clone(),
    })
    .await
    .map_err(Box::new)?;
    let lanes = listen(layout.lane_socket())?;
    let listener = listen(layout.socket())?;
    let (ending, end) = watch::channel(false);
    let ending = Arc::new(ending);
    let under_way = UnderWay::new(Arc::clone(&ending));
    let pools = Pools::open(layout, runtime.clone(), under_way.clone()).await?;
    let routes = routes(Server {
        runtime: runtime.clone(),
        identity: settings.identity.clone(),
        ending,
        under_way: under_way.clone(),
        names: Arc::new(TemplateNames::of(layout)),
        pools: pools.clone(),
    });
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Signals)?;
    // The terminal of whoever happened to start the owner says nothing to it.
    let _hang_up = signal(SignalKind::hangup()).map_err(Error::Signals)?;
    let _interrupt = signal(SignalKind::interrupt()).map_err(Error::Signals)?;
    tracing::info!(pid = settings.identity.pid, build = settings.identity.build, "serving");
    ready();

    let (count, clients) = watch::channel(0_usize);
    let count = Arc::new(count);
    let mut connections = JoinSet::new();
    // Ends with the counting.
    tokio::spawn(idle::rest(clients.clone()));
    let lanes = connections.spawn(lane::serve(lanes, runtime.clone()));
    let idle = idle::idle(&runtime, &pools, &under_way, clients, settings.idle_after);
    tokio::pin!(idle);
    let mut told = end.clone();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(one_client(stream, routes.clone(), Client::arrive(&count)));
                }
                Err(error) => {
                    // Out of file descriptors or memory: the clients there are come first.
                    tracing::error!(%error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = connections.join_next() => {}
            () = &mut idle => break,
            _ = terminate.recv() => break,
            _ = told.wait_for(|told| *told) => break,
        }
    }
    tracing::info!("ending");
    drop(listener);
    lanes.abort();
    // With the lock held, the sockets are still ours.
    let _ = std::fs::remove_file(layout.socket());
    let _ = std::fs::remove_file(layout.lane_socket());
    under_way.finish().await;
    let finish = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(LAST_WORDS, finish).await;
    Ok(())
}

fn prepare(layout: &Layout) -> Result<(), Error> {
    for path in [&layout.data, &layout.runtime] {
        make_private(path).map_err(|source| Error::Directory { path: path.clone(), source })?;
    }
    Ok(())
}

/// The right to be the owner; the kernel takes it back when the process ends, however it does.
fn lock(layout: &Layout) -> Result<File, Error> {
    let path = layout.lock();
    let failed = |source| Error::Lock { path: path.clone(), source };
    let file =
        File::options().create(true).truncate(false).write(true).mode(0o600).open(&path).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(Error::Owned(layout.data.clone())),
        Err(error) => Err(failed(error.into())),
    }
}

fn listen(path: PathBuf) -> Result<UnixListener, Error> {
    let failed = |source| Error::Listen { path: path.clone(), source };
    match std::fs::remove_file(&path) {
        // Left by an owner that was killed.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let listener = UnixListener::bind(&path).map_err(failed)?;
    // Nobody else can enter the directory, so nobody came before this.
    let only_user = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, only_user).map_err(failed)?;
    Ok(listener)
}

fn routes(server: Server) -> Routes {
    let runtime = server.runtime.clone();
    Routes::new(SnapshotsServer::new(server::snapshots::Snapshots(server.clone())))
        .add_service(PoolsServer::new(server::pools::Pools(server.clone())))
        .add_service(RuntimeServer::new(server))
        .add_service(proxy::Proxy::<proxy::Machine>::new(runtime.clone()))
        .add_service(proxy::Proxy::<proxy::Processes>::new(runtime.clone()))
        .add_service(proxy::Proxy::<proxy::Files>::new(runtime.clone()))
        .add_service(proxy::Proxy::<proxy::Ports>::new(runtime))
        .prepare()
}

/// One client that is there, counted while this lives.
struct Client(Arc<watch::Sender<usize>>);

impl Client {
    fn arrive(count: &Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

async fn one_client(stream: UnixStream, routes: Routes, _client: Client) {
    if !is_user(&stream) {
        return;
    }
    if tokio::time::timeout(FIRST_WORD, stream.readable()).await.is_err() {
        return;
    }
    if let Err(error) = connection::serve(stream, routes).await {
        tracing::debug!(%error, "a connection ended");
    }
}
