//! The bridge networks of all VMs of one owner: each a network namespace with a tap, filters and a name server.
//!
//! ```text
//! plan (an address is leased and written down) ─► the VM's record ─► connect ─► VMM ─► … ─► disconnect
//!                                                                      └─► name server, in this process
//! ```
//!
//! Namespace, filters, translation and published ports are the kernel's and outlive their owner. The name server does
//! not: the next owner starts it again when it takes the VM over; until then names do not resolve, and what has been
//! resolved stays open for its time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use imp_network::dns::{Families, NameSockets, Names, Resolvers};
use imp_network::names::VmName;
use imp_network::spec::{
    Guest, GuestError, NotAMac, Publish, PublishOn, Site, TapOwner, Transport, VmNetwork,
};
use imp_network::{NetworkError, Networks};
use ipnet::{Ipv4Net, Ipv6Net};
use tokio_util::task::AbortOnDropHandle;

use super::book::{self, Book};
use crate::id::VmId;
use crate::layout::Layout;
use crate::random;
use crate::spec::{BridgeSettings, BridgeWishes, Egress, IpVersions};
use crate::status::PortFacts;

/// The guest's end, the same in every VM: a snapshot is restored many times, each with the addresses that it knows.
const GUEST: (Ipv4Addr, u8) = (Ipv4Addr::new(172, 16, 0, 2), 30);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 1);
const GUEST6: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfd69, 0x6d70, 0, 0, 0, 0, 0, 2), 64);
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd69, 0x6d70, 0, 0, 0, 0, 0, 1);

/// How long an owner that is on its way out may still hold what it served.
const HAND_OVER: Duration = Duration::from_secs(5);
/// How long a VMM that was killed may still hold its tap.
const TAP_IS_FREE: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);

/// How many connections this host keeps in mind.
const TRACKED: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error("the addresses of bridge networks cannot be kept")]
    Book(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the networks `{site}` on this machine belong to another owner, or to one that is about to end")]
    Site {
        site: String,
        #[source]
        source: io::Error,
    },
    #[error("the MAC address of the VM cannot be used")]
    Mac(#[from] NotAMac),
    #[error("the guest cannot have its address")]
    Guest(#[from] GuestError),
    #[error("cannot open the network namespace {}", path.display())]
    Namespace {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl From<book::Error> for Error {
    fn from(error: book::Error) -> Self {
        Self::Book(Box::new(error))
    }
}

pub(crate) struct Bridges {
    layout: Layout,
    settings: BridgeSettings,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Those that are there, or about to be.
    living: BTreeMap<VmName, VmNetwork>,
    open: Option<Open>,
}

/// Present from the first use on: a host without bridge networks is left as it is.
struct Open {
    networks: Arc<Networks>,
    book: Book,
    mtu: u32,
    /// Whoever has it has the site, in this network namespace.
    _site: UnixListener,
}

impl Bridges {
    pub(crate) fn new(layout: Layout, settings: BridgeSettings) -> Self {
        Self { layout, settings, state: Mutex::default() }
    }

    /// Makes the networks of `living` whole, and removes all others that this data directory has made.
    pub(crate) fn take_over(&self, living: impl IntoIterator<Item = VmNetwork>) -> Result<(), Error> {
        let mut state = self.state();
        state.living = living.into_iter().map(|network| (network.vm.clone(), network)).collect();
        if state.living.is_empty() && !self.layout.networks().exists() {
            return Ok(());
        }
        self.open(&mut state).map(drop)
    }

    /// Leases an address for the VM and says what its network will be; nothing of it is there yet.
    pub(crate) fn plan(
        &self,
        id: &VmId,
        mac: &str,
        wishes: &BridgeWishes,
        tap: TapOwner,
    ) -> Result<(VmNetwork, u32), Error> {
        let vm = name(id);
        let mut guest = Guest::ipv4(mac.parse()?, Ipv4Net::new_assert(GUEST.0, GUEST.1), GATEWAY)?;
        if wishes.versions == IpVersions::Both {
            guest = guest.and_ipv6(Ipv6Net::new_assert(GUEST6.0, GUEST6.1), GATEWAY6)?;
        }
        let egress = wishes.egress.clone().unwrap_or_else(Egress::open);
        egress.check().map_err(|source| NetworkError::Egress { vm: vm.clone(), source })?;
        let mut state = self.state();
        let open = self.open(&mut state)?;
        let routes = imp_network::host_routes(&open.book.site)?;
        let link = open.book.addresses.lease(&vm, &routes).map_err(book::Error::Address)?;
        open.book.write(&self.layout.networks())?;
        let network = VmNetwork { vm, link, tap, guest, publish: Vec::new(), egress };
        Ok((network, open.mtu))
    }

    /// Makes the network; when it fails nothing of it is left but its address. The descriptor is its namespace.
    pub(crate) fn connect(&self, network: &VmNetwork) -> Result<OwnedFd, Error> {
        let networks = {
            let mut state = self.state();
            state.living.insert(network.vm.clone(), network.clone());
            Arc::clone(&self.open(&mut state)?.networks)
        };
        networks.connect(network.clone())?;
        let path = networks.namespace_of(&network.vm);
        let namespace = fs::File::open(&path).map_err(|source| Error::Namespace { path, source })?;
        Ok(namespace.into())
    }

    /// Waits until a VMM can attach to the network that [`Bridges::connect`] has made: one that was killed may still hold its
    /// tap for a moment.
    pub(crate) fn await_free_tap(&self, network: &VmNetwork) -> Result<(), Error> {
        let networks = Arc::clone(&self.open(&mut self.state())?.networks);
        Ok(networks.await_free_tap(&network.vm, TAP_IS_FREE)?)
    }

    /// Removes the network, whose VMM has ended, and gives its address back. Having none is fine.
    pub(crate) fn disconnect(&self, id: &VmId) -> Result<(), Error> {
        let vm = name(id);
        let networks = {
            let mut state = self.state();
            state.living.remove(&vm);
            Arc::clone(&self.open(&mut state)?.networks)
        };
        networks.disconnect(&vm)?;
        let mut state = self.state();
        let open = self.open(&mut state)?;
        open.book.addresses.release(&vm);
        Ok(open.book.write(&self.layout.networks())?)
    }

    /// Answers the VM's questions for names until the handle is dropped. Within a tokio runtime.
    pub(crate) fn name_server(&self, network: &VmNetwork) -> Result<AbortOnDropHandle<()>, Error> {
        let networks = Arc::clone(&self.open(&mut self.state())?.networks);
        let sockets = name_sockets(&networks, &network.vm)?;
        let ipv6 = network.guest.address6().is_some();
        let names = Names {
            vm: network.vm.clone(),
            egress: network.egress.clone(),
            families: if ipv6 { Families::Both } else { Families::Ipv4 },
            resolvers: Resolvers::OfHost,
            admission: networks.admission(&network.vm)?,
        };
        let vm = network.vm.clone();
        Ok(AbortOnDropHandle::new(tokio::spawn(async move {
            if let Err(error) = imp_network::dns::serve(sockets, names).await {
                tracing::error!(%vm, %error, "the name server of a VM ended");
            }
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Changed by single inserts and removals: whoever panicked left it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open<'a>(&self, state: &'a mut State) -> Result<&'a mut Open, Error> {
        let open = match state.open.take() {
            Some(open) => open,
            None => self.begin(&state.living)?,
        };
        Ok(state.open.insert(open))
    }

    fn begin(&self, living: &BTreeMap<VmName, VmNetwork>) -> Result<Open, Error> {
        let path = self.layout.networks();
        let mut book = match Book::read(&path)? {
            Some(book) => book,
            None => self.new_book()?,
        };
        let held: BTreeSet<VmName> = book.addresses.holders().cloned().collect();
        for gone in held.iter().filter(|vm| !living.contains_key(*vm)) {
            book.addresses.release(gone);
        }
        let book = book.with_pool(self.settings.pool);
        // Before anything of it is there: what nobody has written down nobody removes.
        book.write(&path)?;
        let taken = |source| Error::Site { site: book.site.to_string(), source };
        let listener = take(&format!("imp-network-{}", book.site)).map_err(taken)?;
        let mtu = imp_network::outward_mtu(&book.site)?;
        let site = Site {
            name: book.site.clone(),
            pool: book.addresses.pool(),
            outside: self.settings.outside,
            mtu,
            connections: book.connections,
        };
        for chain in imp_network::obstacles(&site.name)? {
            let accept = format!("{}*", site.name.prefix());
            tracing::warn!(chain, accept, "a firewall drops what VMs send unless it accepts these devices");
        }
        let networks = Networks::open(site, &self.layout.namespaces(), living.values().cloned())?;
        Ok(Open { networks: Arc::new(networks), book, mtu, _site: listener })
    }

    fn new_book(&self) -> Result<Book, Error> {
        let digits = random::bytes();
        let routes = imp_network::host_routes(&book::site(digits))?;
        let tracked = fs::read_to_string(TRACKED).ok().and_then(|text| text.trim().parse().ok());
        Ok(Book::new(digits, self.settings.pool, &routes, tracked)?)
    }
}

/// A name that one process at a time has, in one network namespace.
fn take(name: &str) -> io::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(name)?;
    until_let_go(|| UnixListener::bind_addr(&address), |error| error.kind() == io::ErrorKind::AddrInUse)
}

fn name_sockets(networks: &Networks, vm: &VmName) -> Result<NameSockets, NetworkError> {
    until_let_go(
        || networks.name_sockets(vm),
        |error| match error {
            NetworkError::NameSockets { source, .. } => source.kind() == io::ErrorKind::AddrInUse,
            _ => false,
        },
    )
}

/// An owner that is about to end may hold for a moment what it served.
fn until_let_go<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    is_held: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let end = Instant::now() + HAND_OVER;
    loop {
        match attempt() {
            Err(error) if is_held(&error) && Instant::now() < end => thread::sleep(AGAIN),
            result => return result,
        }
    }
}

/// The ports of a VM as its network publishes them.
pub(crate) fn published(ports: &[PortFacts]) -> Vec<Publish> {
    let on = |address: IpAddr| match address {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => PublishOn::AnyIpv4,
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => PublishOn::AnyIpv6,
        address => PublishOn::Address(address),
    };
    let publish = |port: &PortFacts| Publish {
        transport: Transport::Tcp,
        on: on(port.host.ip()),
        host_port: port.host.port(),
        guest_port: port.guest,
    };
    ports.iter().map(publish).collect()
}

fn name(id: &VmId) -> VmName {
    id.as_str().parse().expect("sixteen hex digits name a VM's network")
}
