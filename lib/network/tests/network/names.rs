//! The name server of a VM.

use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use imp_network::dns::{Families, Names, Resolvers, serve};
use imp_network::egress::{Allow, Egress, PortRange, Ports, Scope};
use imp_network::spec::{Outside, Transport, VmNetwork};
use imp_network::{Networks, Opening};
use imp_sys::netns;
use std::os::fd::AsFd;

use crate::world::guest::Guest;
use crate::world::{DEADLINE, HOST, OTHER_SERVER, SERVER, at, on_own_host};

const GATEWAY: &str = "172.16.0.1";

/// The host's name server: it knows one address for every name, and remembers what it was asked.
fn upstream(address: [u8; 4]) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (at, log) = (socket.local_addr().unwrap(), Arc::clone(&asked));
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let question = Message::from_vec(&buffer[..length]).unwrap();
            let query = question.queries[0].clone();
            log.lock().unwrap().push(query.name.to_ascii());
            let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
            answer.add_answer(Record::from_rdata(query.name.clone(), 60, RData::A(A(address.into()))));
            answer.add_query(query);
            // First a forged one, for another question.
            let mut forged = answer.clone();
            forged.metadata.id ^= 1;
            socket.send_to(&forged.to_vec().unwrap(), from).unwrap();
            socket.send_to(&answer.to_vec().unwrap(), from).unwrap();
        }
    });
    (at, asked)
}

/// Serves the VM's names on a thread, in the namespace of the host, for as long as the test runs.
fn serve_names(networks: &Networks, vm: &VmNetwork, resolver: SocketAddr) {
    let sockets = networks.name_sockets(&vm.vm).unwrap();
    let names = Names {
        vm: vm.vm.clone(),
        egress: vm.egress.clone(),
        families: Families::Ipv4,
        resolvers: Resolvers::These(vec![resolver]),
        admission: networks.admission(&vm.vm).unwrap(),
    };
    let host = netns::current().unwrap();
    thread::spawn(move || {
        netns::inside(host.as_fd(), || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let _ = runtime.block_on(serve(sockets, names));
        })
    });
}

fn ask(guest: &mut Guest, name: &str) -> Message {
    let mut message = Message::query();
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    Message::from_vec(&guest.ask(at(GATEWAY, 53), &message.to_vec().unwrap())).unwrap()
}

#[test]
fn an_allowed_name_opens_its_address_and_port_and_another_name_nothing() {
    let port = Ports::Only([PortRange::one(Transport::Tcp, 80)].into());
    let name = "allowed.example".parse().unwrap();
    let egress = Egress::only(vec![Allow::Name { name, ports: port, scope: Scope::Anywhere }]);
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        let refused = world.collect_udp(80).unwrap();
        let networks = world.networks();
        let vm = world.vm("a", egress);
        networks.connect(vm.clone()).unwrap();
        let (resolver, asked) = upstream([198, 51, 100, 7]);
        serve_names(&networks, &vm, resolver);
        let mut guest = Guest::new(&networks, &vm.vm);

        guest.send(at(OTHER_SERVER, 80), "before its name was asked for");
        guest.until_refused(at(OTHER_SERVER, 80));
        let no = ask(&mut guest, "other.example.");
        assert_eq!((no.metadata.response_code, no.answers.len()), (ResponseCode::NXDomain, 0));
        let yes = ask(&mut guest, "Allowed.Example.");
        assert_eq!((yes.metadata.response_code, yes.answers.len()), (ResponseCode::NoError, 1));
        assert_eq!(guest.fetch(at(OTHER_SERVER, 80)), HOST);
        assert_eq!(*asked.lock().unwrap(), ["Allowed.Example."]);
        assert!(refused.try_recv().is_err());
        // The addresses that names opened are no fault to be mended.
        assert_eq!(networks.pending().unwrap(), []);
    });
}

#[test]
fn questions_are_answered_on_a_connection_while_others_say_nothing() {
    on_own_host(Outside::Masquerade, |world| {
        let networks = world.networks();
        let vm = world.vm("a", Egress::open());
        networks.connect(vm.clone()).unwrap();
        let (resolver, _asked) = upstream([198, 51, 100, 7]);
        serve_names(&networks, &vm, resolver);
        let mut guest = Guest::new(&networks, &vm.vm);
        for _ in 0..8 {
            guest.exchange(at(GATEWAY, 53), &[0], 0);
        }
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii("any.example.").unwrap(), RecordType::A));
        let question = message.to_vec().unwrap();
        let mut bytes = u16::try_from(question.len()).unwrap().to_be_bytes().to_vec();
        bytes.extend(question);
        let answer = guest.exchange(at(GATEWAY, 53), &bytes, 2 + bytes.len());
        let length = usize::from(u16::from_be_bytes([answer[0], answer[1]]));
        let answer = Message::from_vec(&answer[2..2 + length]).unwrap();
        assert_eq!((answer.metadata.id, answer.answers.len()), (message.metadata.id, 1));
    });
}

#[test]
fn an_opened_address_closes_when_its_time_is_over() {
    let name = "allowed.example".parse().unwrap();
    let egress = Egress::only(vec![Allow::Name { name, ports: Ports::Any, scope: Scope::Anywhere }]);
    on_own_host(Outside::Masquerade, |world| {
        let arrivals = world.collect_udp(9).unwrap();
        let networks = world.networks();
        let vm = world.vm("a", egress);
        networks.connect(vm.clone()).unwrap();
        let admission = networks.admission(&vm.vm).unwrap();
        let mut guest = Guest::new(&networks, &vm.vm);
        let opening = |milliseconds| Opening {
            address: SERVER.parse().unwrap(),
            ports: Ports::Any,
            time: std::time::Duration::from_millis(milliseconds),
        };
        // A second opening counts anew, so the address is open although the first time is short.
        admission.open(&[opening(1)]).unwrap();
        admission.open(&[opening(60_000)]).unwrap();
        guest.send(at(SERVER, 9), "open");
        assert_eq!(arrivals.recv_timeout(DEADLINE).unwrap().1, b"open");
        admission.open(&[opening(1)]).unwrap();
        // Each datagram is from a port of its own, so none belongs to a connection that was let through.
        let end = std::time::Instant::now() + DEADLINE;
        while !guest.was_refused(at(SERVER, 9)) {
            assert!(std::time::Instant::now() < end, "the address stayed open");
            guest.send(at(SERVER, 9), "until it is shut");
        }
    });
}
