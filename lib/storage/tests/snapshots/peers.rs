//! Snapshots from machine to machine.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use imp_storage::image::registry;
use imp_storage::snapshots::peer::server::Server;
use imp_storage::snapshots::peer::tls::Credentials;
use imp_storage::snapshots::peer::{Peer, PeerName};
use imp_storage::snapshots::{Error, Snapshot};
use imp_storage::store::Store;
use imp_testkit::machine::program;

use crate::fixture::{CHUNK, FULL, assert_same, commit, host, leftovers, store};

/// Two machines, of which one has a snapshot that is pinned and serves it; and the authority that both trust.
struct Machines {
    folder: tempfile::TempDir,
    ours: Arc<Store>,
    made: Snapshot,
    address: SocketAddr,
    runtime: tokio::runtime::Runtime,
}

impl Machines {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        authority(folder.path(), "authority");
        let ours = Arc::new(store(&folder.path().join("ours")));
        let made = commit(&ours, 1);
        ours.pin(&made.digest, "pool").unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        let credentials = credentials(folder.path(), "authority", "server.example");
        let may_ask = ["node-1.example", "node-2.example"].map(|name| name.parse().unwrap());
        let server = Server::new(Arc::clone(&ours), &credentials, may_ask.into()).unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(server.serve(listener));
        Self { folder, ours, made, address, runtime }
    }

    /// What a machine of this name, with a certificate of that authority, asks.
    fn peer(&self, authority: &str, name: &str) -> Peer {
        let credentials = credentials(self.folder.path(), authority, name);
        Peer { address: self.address, name: "server.example".parse().unwrap(), credentials }
    }

    fn theirs(&self) -> Store {
        store(&self.folder.path().join("theirs"))
    }
}

fn openssl(folder: &Path, arguments: &[&str]) {
    let mut command = Command::new(program("openssl").unwrap());
    let output = command.current_dir(folder).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const KEY: [&str; 5] = ["-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"];

fn authority(folder: &Path, name: &str) {
    let (subject, key, certificate) = (format!("/CN={name}"), format!("{name}.key"), format!("{name}.pem"));
    let own = ["req", "-x509", "-days", "2", "-subj", &subject, "-keyout", &key, "-out", &certificate];
    openssl(folder, &[&own[..], &KEY].concat());
}

/// Of a machine, for both sides of a connection. It trusts whom everybody trusts.
fn credentials(folder: &Path, authority: &str, name: &str) -> Credentials {
    let (key, certificate) = files(folder, authority, name);
    Credentials::load(&certificate, &key, &folder.join("authority.pem")).unwrap()
}

fn files(folder: &Path, authority: &str, name: &str) -> (PathBuf, PathBuf) {
    let names = format!("subjectAltName=DNS:{name}");
    let file = format!("{authority}-{name}");
    let (key, certificate) = (format!("{file}.key"), format!("{file}.pem"));
    let (ca, ca_key) = (format!("{authority}.pem"), format!("{authority}.key"));
    let of = ["-CA", &ca, "-CAkey", &ca_key, "-addext", &names, "-addext", "basicConstraints=CA:FALSE"];
    let own = ["req", "-x509", "-days", "2", "-subj", "/CN=machine", "-keyout", &key, "-out", &certificate];
    openssl(folder, &[&own[..], &KEY, &of].concat());
    (folder.join(key), folder.join(certificate))
}

/// Passes connections on, each only for so many bytes of the answer.
fn cutting(to: SocketAddr, allowed: impl Fn(usize) -> u64 + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            let (Ok(client), allowed) = (client, allowed(number)) else { return };
            let Ok(server) = TcpStream::connect(to) else { return };
            let (mut up, mut down) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = io::copy(&mut up, &mut &server);
                let _ = server.shutdown(Shutdown::Both);
            });
            std::thread::spawn(move || {
                let _ = io::copy(&mut Read::by_ref(&mut down).take(allowed), &mut &client);
                let _ = client.shutdown(Shutdown::Both);
                let _ = down.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

#[test]
fn a_machine_gets_what_its_peer_keeps() {
    let machines = Machines::new();
    let theirs = machines.theirs();
    let peer = machines.peer("authority", "node-1.example");
    let digest = machines.made.digest;
    let arrival = theirs.snapshots().fetch(&digest, &peer, &()).unwrap();
    assert_eq!(arrival.fetched, (FULL - 1) * CHUNK + 5);
    assert_same(&machines.made, &arrival.snapshot);
    theirs.snapshots().open(&digest, &host()).unwrap();
    assert_eq!(theirs.snapshots().fetch(&digest, &peer, &()).unwrap().fetched, 0);
    drop(arrival);
    assert!(leftovers(&machines.folder.path().join("theirs")).is_empty());
    // Of the next version only what is new.
    let newer = commit(&machines.ours, 2);
    machines.ours.pin(&newer.digest, "pool").unwrap();
    let arrival = theirs.snapshots().fetch(&newer.digest, &peer, &()).unwrap();
    assert_eq!(arrival.fetched, CHUNK);
    assert_same(&newer, &arrival.snapshot);
}

#[test]
fn a_machine_asks_for_what_a_template_leads_to() {
    let machines = Machines::new();
    let theirs = machines.theirs();
    let peer = machines.peer("authority", "node-1.example");
    let template = crate::fixture::description().template.unwrap();
    let find = || theirs.snapshots().find_at(&template, &peer, &()).unwrap();
    assert_eq!(find(), None);
    let snapshots = machines.ours.snapshots();
    snapshots.name(&template, &machines.made.digest).unwrap();
    assert_eq!(find(), Some(machines.made.digest));
    let unpinned = commit(&machines.ours, 2);
    snapshots.name(&template, &unpinned.digest).unwrap();
    assert_eq!(find(), None);
}

#[test]
fn from_async_code_it_is_the_same() {
    let machines = Machines::new();
    let theirs = machines.theirs();
    let peer = machines.peer("authority", "node-1.example");
    let arrival =
        machines.runtime.block_on(async { theirs.snapshots().fetch(&machines.made.digest, &peer, &()) });
    assert_same(&machines.made, &arrival.unwrap().snapshot);
}

#[test]
fn what_nothing_pins_or_is_not_there_is_not_given_away() {
    let machines = Machines::new();
    let theirs = machines.theirs();
    let peer = machines.peer("authority", "node-1.example");
    let unpinned = commit(&machines.ours, 2);
    for digest in [unpinned.digest, imp_storage::blob::digest::Digest::of(b"none")] {
        let refused = theirs.snapshots().fetch(&digest, &peer, &());
        assert!(matches!(refused, Err(Error::NotThere { .. })), "{refused:?}");
    }
}

#[test]
fn what_a_server_offers_is_given_away_pinned_or_not_and_stays_meanwhile() {
    let machines = Machines::new();
    let unpinned = commit(&machines.ours, 2);
    let digest = unpinned.digest;
    let credentials = credentials(machines.folder.path(), "authority", "other.example");
    let may_ask = vec!["node-1.example".parse().unwrap()];
    let server = Server::offering(Arc::clone(&machines.ours), &credentials, may_ask, vec![unpinned]).unwrap();
    let listener = machines.runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let mut peer = machines.peer("authority", "node-1.example");
    (peer.address, peer.name) = (listener.local_addr().unwrap(), "other.example".parse().unwrap());
    let serving = machines.runtime.spawn(server.serve(listener));
    let removed = machines.ours.snapshots().remove(&digest);
    assert!(matches!(removed, Err(Error::InUse { .. })), "{removed:?}");
    machines.theirs().snapshots().fetch(&digest, &peer, &()).unwrap();
    serving.abort();
    machines.runtime.block_on(serving).unwrap_err();
    // What it was reading for its last connection ends a moment after it.
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = machines.ours.snapshots().remove(&digest) {
        assert!(matches!(error, Error::InUse { .. }) && Instant::now() < deadline, "{error:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_connection_that_is_cut_again_and_again_only_costs_the_chunk_that_it_carried() {
    let machines = Machines::new();
    let theirs = machines.theirs();
    let mut peer = machines.peer("authority", "node-1.example");
    let connections = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&connections);
    // Enough for the certificates and one or two chunks.
    peer.address = cutting(machines.address, move |number| {
        seen.store(number + 1, Ordering::SeqCst);
        120_000
    });
    let arrival = theirs.snapshots().fetch(&machines.made.digest, &peer, &()).unwrap();
    assert!(connections.load(Ordering::SeqCst) > 3);
    assert_eq!((arrival.fetched, arrival.resumed), ((FULL - 1) * CHUNK + 5, 0));
    assert_same(&machines.made, &arrival.snapshot);
}

#[test]
fn a_pull_whose_peer_goes_away_is_resumed_from_another() {
    let machines = Machines::new();
    let theirs = machines.theirs();
    let good = machines.peer("authority", "node-1.example");
    let mut peer = good.clone();
    peer.address = cutting(machines.address, |number| if number < 4 { 60_000 } else { 0 });
    let failed = theirs.snapshots().fetch(&machines.made.digest, &peer, &());
    assert!(matches!(failed, Err(Error::Peer { .. })), "{failed:?}");
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
    let arrival = theirs.snapshots().fetch(&machines.made.digest, &good, &()).unwrap();
    assert!(arrival.resumed > 0, "{arrival:?}");
    assert_eq!(arrival.resumed + arrival.fetched, (FULL - 1) * CHUNK + 5);
    assert_same(&machines.made, &arrival.snapshot);
}

#[test]
fn a_certificate_of_another_authority_or_for_another_name_is_refused() {
    let machines = Machines::new();
    authority(machines.folder.path(), "stranger");
    let theirs = machines.theirs();
    let digest = machines.made.digest;
    let fetch = |peer: &Peer| theirs.snapshots().fetch(&digest, peer, &());
    // A good certificate, of a machine that is not asked to ask.
    let refused = fetch(&machines.peer("authority", "node-3.example"));
    assert!(matches!(refused, Err(Error::NotAuthorised { .. })), "{refused:?}");
    // The right name, from an authority that nobody trusts.
    let Err(Error::Peer { source, .. }) = fetch(&machines.peer("stranger", "node-1.example")) else {
        panic!("a stranger was served")
    };
    let is_expected = matches!(*source, registry::Error::NotAccepted { .. } | registry::Error::Cut { .. });
    assert!(is_expected, "{source}");
    // The server is not who it was taken for.
    let mut peer = machines.peer("authority", "node-1.example");
    peer.name = "another.example".parse::<PeerName>().unwrap();
    let Err(Error::Peer { source, .. }) = fetch(&peer) else { panic!("the wrong server was asked") };
    assert!(matches!(*source, registry::Error::Certificate { .. }), "{source}");
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
    fetch(&machines.peer("authority", "node-2.example")).unwrap();
}

#[test]
fn nobody_is_served_without_a_certificate_or_by_an_older_tls() {
    let machines = Machines::new();
    let folder = machines.folder.path();
    let (key, certificate) = files(folder, "authority", "node-1.example");
    let (key, certificate) = (key.display().to_string(), certificate.display().to_string());
    let ask = |arguments: &[&str]| {
        let mut command = Command::new(program("openssl").unwrap());
        let address = machines.address.to_string();
        command.args(["s_client", "-quiet", "-ign_eof", "-connect", &address]).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let request = format!(
            "GET /v1/snapshots/{}/manifest HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            machines.made.digest.hex()
        );
        // Whoever is refused at once reads nothing.
        let _ = process.stdin.take().unwrap().write_all(request.as_bytes());
        String::from_utf8_lossy(&process.wait_with_output().unwrap().stdout).into_owned()
    };
    let own = ["-key", &key, "-cert", &certificate];
    assert!(ask(&own).starts_with("HTTP/1.1 200"));
    assert_eq!(ask(&[]), "");
    assert_eq!(ask(&[&own[..], &["-tls1_2"]].concat()), "");
}

#[test]
fn a_peer_that_lies_is_found_out() {
    let machines = Machines::new();
    let theirs = machines.theirs();
    let peer = machines.peer("authority", "node-1.example");
    // Its disk has rotted: what it reads is not what it promised.
    let memory = machines.made.part(imp_storage::snapshots::Part::Memory);
    let mut bytes = fs::read(&memory).unwrap();
    bytes[5000] ^= 1;
    fs::remove_file(&memory).unwrap();
    fs::write(&memory, bytes).unwrap();
    let failed = theirs.snapshots().fetch(&machines.made.digest, &peer, &());
    let Err(Error::Peer { source, .. }) = failed else { panic!("{failed:?}") };
    assert!(matches!(*source, registry::Error::Status { code: 500, .. }), "{source}");
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
}
