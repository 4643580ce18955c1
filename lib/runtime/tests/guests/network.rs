//! What a guest reaches, and what it does not.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use imp_runtime::spec::{Child, NetworkMode, PublishedPort};
use imp_runtime::status::{Outcome, State};
use imp_runtime::template::Probe;
use imp_testkit::machine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::driver::{lacks, makes_none, on_driver};
use super::fork::forked;
use super::host::{Host, LONG, exec, running, start};
use super::owner::{Owner, Then, User};
use super::restore::{child, restored};
use super::template::{end, ready, template};

/// A web server on the host with one page; counts who came.
struct Server {
    address: SocketAddr,
    visitors: Arc<AtomicUsize>,
}

impl Server {
    fn start(address: IpAddr) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let visitors = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&visitors);
        // It ends with the test program.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                count.fetch_add(1, Ordering::SeqCst);
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 1024]);
                let _ = stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello");
            }
        });
        Self { address, visitors }
    }

    fn visitors(&self) -> usize {
        self.visitors.load(Ordering::SeqCst)
    }
}

/// An address of this machine that is not loopback. Nothing is sent.
fn own_address() -> IpAddr {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("203.0.113.1:9").expect("a route to other machines: passt needs one, too");
    socket.local_addr().unwrap().ip()
}

/// Whether the host's own name server answers this host.
fn name_server_answers() -> bool {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap();
    let server =
        text.lines().find_map(|line| line.trim().strip_prefix("nameserver")).expect("a name server").trim();
    let server: IpAddr = server.parse().unwrap();
    let socket = UdpSocket::bind(if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    // A question for the address of "a.invalid.": RFC 1035.
    let question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x07invalid\x00\x00\x01\x00\x01";
    socket.send_to(question, (server, 53)).is_ok() && socket.recv(&mut [0; 512]).is_ok()
}

/// What the guest's web server says there.
async fn page(address: SocketAddr) -> String {
    let page = async {
        let mut stream = tokio::net::TcpStream::connect(address).await?;
        stream.write_all(b"GET /index.html HTTP/1.0\r\n\r\n").await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await.map(|_| page)
    };
    tokio::time::timeout(super::host::LONG, page).await.unwrap().unwrap()
}

#[test]
fn a_guest_reaches_what_the_host_reaches_but_not_the_hosts_loopback() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        if lacks(&runtime, NetworkMode::User) {
            return;
        }
        let (outside, loopback) = (Server::start(own_address()), Server::start([127, 0, 0, 1].into()));
        let mut spec = host.shell("online", "echo page >/tmp/index.html; exec httpd -f -p 8080 -h /tmp");
        spec.network = Some(NetworkMode::User);
        spec.ports =
            vec![PublishedPort { host: "127.0.0.1:0".parse().unwrap(), guest: 8080.try_into().unwrap() }];
        let id = start(&runtime, spec).await;
        let none = start(&runtime, host.spec("offline", &["sleep", "1000"])).await;
        let status = running(&runtime, &id).await;

        let get = |address: SocketAddr| format!("timeout 30 wget -q -O - http://{address}/ 2>&1");
        assert_eq!(exec(&runtime, &id, &get(outside.address)).await, ("hello".into(), 0));
        assert_eq!(outside.visitors(), 1);
        for to in ["127.0.0.1", "10.0.2.2", "0.0.0.0"] {
            let address = SocketAddr::new(to.parse().unwrap(), loopback.address.port());
            let (text, code) = exec(&runtime, &id, &get(address)).await;
            assert!(code != 0 && !text.contains("hello"), "{to}: {text}");
        }
        // Also straight, where a program puts any address in its packets.
        let routed = format!("ip route add 127.0.0.2 via 10.0.2.2 2>&1; {}", get(loopback.address));
        assert_ne!(exec(&runtime, &id, &routed).await.1, 0);
        assert_eq!(loopback.visitors(), 0);

        // A name that nobody has: an answer tells that the question came through.
        let (text, _) = exec(&runtime, &id, "timeout 60 nslookup a.invalid 2>&1; cat /etc/resolv.conf").await;
        let answered = text.contains("NXDOMAIN")
            || text.contains("can't find a.invalid")
            || text.contains("can't resolve");
        assert_eq!(answered && !text.contains("timed out"), name_server_answers(), "{text}");

        let address = status.ports[0].host;
        assert_ne!(address.port(), 0);
        let page = page(address).await;
        assert!(page.starts_with("HTTP/1.") && page.ends_with("page\n"), "{page}");

        running(&runtime, &none).await;
        let (text, code) =
            exec(&runtime, &none, &format!("ls /sys/class/net; {}", get(outside.address))).await;
        assert!(code != 0 && text.starts_with("lo\n") && !text.contains("eth"), "{text}");
        assert_eq!(outside.visitors(), 1);

        runtime.kill(&id).await.unwrap();
        runtime.kill(&none).await.unwrap();
        assert!(tokio::net::TcpStream::connect(address).await.is_err(), "the port is free again");
        host.end(runtime).await;
    });
}

#[test]
fn vms_of_a_snapshot_reach_the_world_and_are_reached_by_helpers_of_their_own() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if lacks(&runtime, NetworkMode::User) || makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let server = Server::start(own_address());
        let mut spec = host.shell("unused", "echo page >/tmp/index.html; exec httpd -f -p 8080 -h /tmp");
        spec.network = Some(NetworkMode::User);
        let mut template = template(spec);
        template.ready = vec![ready(Probe::Port(8080.try_into().unwrap()), LONG)];
        let made = runtime.template_build(template, |_| {}).await.unwrap();
        let with_port = |name: &str| Child {
            ports: vec![PublishedPort {
                host: "127.0.0.1:0".parse().unwrap(),
                guest: 8080.try_into().unwrap(),
            }],
            ..child(name)
        };
        let one = restored(&runtime, &made, with_port("one")).await;
        let two = restored(&runtime, &made, with_port("two")).await;
        let three = forked(&runtime, &two, &["three"]).await.remove(0);
        for (visitors, id) in (1..).zip([&one, &two, &three]) {
            let get = format!("timeout 60 wget -q -O - http://{}/ 2>&1", server.address);
            assert_eq!(exec(&runtime, id, &get).await, ("hello".into(), 0));
            assert_eq!(server.visitors(), visitors);
        }
        for id in [&one, &two] {
            assert_eq!(exec(&runtime, id, "hostname >/tmp/index.html").await.1, 0);
            let page = page(runtime.get(id).unwrap().ports[0].host).await;
            assert!(page.ends_with(&format!("{}\n", id.short())), "{page}");
        }
        for id in [&one, &two, &three] {
            runtime.kill(id).await.unwrap();
        }
        end(&host, runtime).await;
    });
}

/// Nobody's, on every Linux.
const NOBODY: u32 = 65_534;

#[test]
fn an_ordinary_user_runs_a_vm_with_a_network_and_is_told_which_limits_he_does_not_get() {
    on_driver(async {
        let host = Host::new();
        if lacks(&host.open().await, NetworkMode::User) {
            return;
        }
        let server = Server::start(own_address());
        // What he runs and reads must be where he may: the home of whoever runs the tests is not.
        let copy = |from: &Path, name: &str| {
            let to = host.path().join(name);
            std::fs::copy(from, &to).unwrap();
            std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)).unwrap();
            to
        };
        let program = copy(&std::env::current_exe().unwrap(), "owner");
        let mut config = host.config();
        config.guest_agent = copy(&machine::guest_agent().unwrap(), "agent");
        let link = host.data().join("kernels");
        let kernels = std::fs::canonicalize(&link).unwrap();
        std::fs::remove_file(&link).unwrap();
        std::fs::create_dir_all(link.join("default")).unwrap();
        for name in ["vmlinux", "modules.cpio", "release"] {
            copy(&kernels.join("default").join(name), &format!("data/kernels/default/{name}"));
        }
        if rustix::process::geteuid().is_root() {
            give(host.path());
        }

        let mut spec = host.shell("his", &format!("wget -q -O - http://{}/", server.address));
        spec.network = Some(NetworkMode::User);
        let user = User { program, uid: NOBODY };
        let mut owner = Owner::start_as(&host, config, vec![(spec, Then::LetRun)], Some(user));
        let mut last = owner.next();
        while last.state != State::Stopped {
            last = owner.next();
        }
        assert_eq!(last.outcome, Some(Outcome::Exited { code: 0 }), "{last:#?}");
        assert_eq!(server.visitors(), 1);
        let limits: Vec<_> = last.not_enforced.iter().map(|limit| limit.limit.as_str()).collect();
        if rustix::process::geteuid().is_root() {
            assert_eq!(limits, ["memory", "cpu", "pids"]);
            assert!(last.limits.is_empty(), "{:?}", last.limits);
            assert!(last.not_enforced.iter().all(|limit| !limit.why.is_empty()));
        }
    });
}

fn give(path: &Path) {
    std::os::unix::fs::lchown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path());
        }
    }
}
