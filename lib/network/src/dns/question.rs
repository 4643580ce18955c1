//! What is done about a guest's question: pure.

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, Record, RecordType};

use super::Families;
use crate::egress::{DomainName, Egress, Otherwise};

/// The largest datagram that passes everywhere unfragmented.
const LARGEST_DATAGRAM: u16 = 1232;
/// What every client takes.
const SMALLEST_DATAGRAM: u16 = 512;

#[derive(Debug)]
pub(super) enum Decision {
    Answer(Vec<u8>),
    Ask(Question),
}

/// How question and answer travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Datagram,
    Stream,
}

/// Whether a message uses the extension mechanism of RFC 6891; an answer does as its question did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    Plain,
    Extended,
}

impl Dialect {
    fn of(message: &Message) -> Self {
        if message.edns.is_some() { Self::Extended } else { Self::Plain }
    }
}

/// A question that may be asked.
#[derive(Debug, Clone)]
pub(super) struct Question {
    id: u16,
    query: Query,
    dialect: Dialect,
    room: usize,
    /// Nothing if it is no host's name, which only an open policy lets pass.
    domain: Option<DomainName>,
}

/// Nothing, if the bytes are not a question at all.
pub(super) fn decide(
    bytes: &[u8],
    carrier: Carrier,
    egress: &Egress,
    families: Families,
) -> Option<Decision> {
    let message = Message::from_vec(bytes).ok()?;
    if message.metadata.message_type != MessageType::Query {
        return None;
    }
    let [query] = message.queries.as_slice() else {
        return answer(&message, None, ResponseCode::FormErr);
    };
    if message.metadata.op_code != OpCode::Query || query.query_class != DNSClass::IN {
        return answer(&message, Some(query), ResponseCode::NotImp);
    }
    let domain: Option<DomainName> = query.name.to_ascii().parse().ok();
    let open = egress.otherwise == Otherwise::Allow;
    let allowed = open || domain.as_ref().is_some_and(|name| egress.may_resolve(name));
    if !allowed {
        // "There is no such name" ends a program's attempt at once; "refused" makes it ask again and again.
        return answer(&message, Some(query), ResponseCode::NXDomain);
    }
    match query.query_type {
        RecordType::AAAA if families == Families::Ipv4 => {
            return answer(&message, Some(query), ResponseCode::NoError);
        }
        // They carry addresses as hints: without them a client asks for the addresses themselves.
        RecordType::HTTPS | RecordType::SVCB if !open => {
            return answer(&message, Some(query), ResponseCode::NoError);
        }
        RecordType::A
        | RecordType::AAAA
        | RecordType::CAA
        | RecordType::CNAME
        | RecordType::HTTPS
        | RecordType::MX
        | RecordType::NAPTR
        | RecordType::NS
        | RecordType::PTR
        | RecordType::SOA
        | RecordType::SRV
        | RecordType::SVCB
        | RecordType::TXT => {}
        // Zone transfers, "any", and what carries nothing for a client.
        _ => return answer(&message, Some(query), ResponseCode::NotImp),
    }
    let room = match carrier {
        Carrier::Stream => usize::from(u16::MAX),
        Carrier::Datagram => {
            let offered = message.edns.as_ref().map_or(SMALLEST_DATAGRAM, Edns::max_payload);
            usize::from(offered.clamp(SMALLEST_DATAGRAM, LARGEST_DATAGRAM))
        }
    };
    Some(Decision::Ask(Question {
        id: message.metadata.id,
        query: query.clone(),
        dialect: Dialect::of(&message),
        room,
        domain,
    }))
}

fn answer(question: &Message, query: Option<&Query>, code: ResponseCode) -> Option<Decision> {
    let message = response(question.metadata.id, query, Dialect::of(question), code);
    message.to_vec().ok().map(Decision::Answer)
}

fn response(id: u16, query: Option<&Query>, dialect: Dialect, code: ResponseCode) -> Message {
    let mut message = Message::response(id, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.metadata.recursion_available = true;
    message.metadata.response_code = code;
    message.add_queries(query.cloned());
    if dialect == Dialect::Extended {
        let mut edns = Edns::new();
        edns.set_max_payload(LARGEST_DATAGRAM);
        message.set_edns(edns);
    }
    message
}

impl Question {
    pub(super) fn name(&self) -> &Name {
        &self.query.name
    }

    pub(super) fn domain(&self) -> Option<&DomainName> {
        self.domain.as_ref()
    }

    /// A question of our own for the same, with a number that nobody can guess.
    pub(super) fn to_upstream(&self) -> Message {
        let mut message = Message::query();
        message.metadata.recursion_desired = true;
        message.add_query(self.query.clone());
        let mut edns = Edns::new();
        edns.set_max_payload(LARGEST_DATAGRAM);
        message.set_edns(edns);
        message
    }

    /// The answer to the guest; only its head, if it has no room for more.
    pub(super) fn reply(&self, records: Vec<Record>, code: ResponseCode) -> Option<Vec<u8>> {
        let mut message = response(self.id, Some(&self.query), self.dialect, code);
        message.add_answers(records);
        let bytes = message.to_vec().ok()?;
        if bytes.len() <= self.room { Some(bytes) } else { message.truncate().to_vec().ok() }
    }

    pub(super) fn failure(&self) -> Option<Vec<u8>> {
        self.reply(Vec::new(), ResponseCode::ServFail)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::egress::{Allow, Ports, Scope};

    fn only(name: &str) -> Egress {
        Egress::only(vec![Allow::Name {
            name: name.parse().unwrap(),
            ports: Ports::Any,
            scope: Scope::Public,
        }])
    }

    fn ask(name: &str, kind: RecordType) -> Vec<u8> {
        let mut message = Message::query();
        message.metadata.id = 77;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message.to_vec().unwrap()
    }

    fn code(bytes: &[u8], egress: &Egress) -> Option<ResponseCode> {
        match decide(bytes, Carrier::Datagram, egress, Families::Ipv4)? {
            Decision::Ask(_) => None,
            Decision::Answer(answer) => {
                let message = Message::from_vec(&answer).unwrap();
                assert_eq!((message.metadata.id, message.answers.len()), (77, 0));
                Some(message.metadata.response_code)
            }
        }
    }

    #[test]
    fn each_question_has_its_outcome() {
        let egress = only("*.example.com");
        for (name, kind, outcome) in [
            ("www.example.com.", RecordType::A, None),
            ("WWW.EXAMPLE.COM.", RecordType::TXT, None),
            ("example.com.", RecordType::A, Some(ResponseCode::NXDomain)),
            ("www.example.com.evil.net.", RecordType::A, Some(ResponseCode::NXDomain)),
            ("a\\.example.com.", RecordType::A, Some(ResponseCode::NXDomain)),
            ("www.example.com.", RecordType::AAAA, Some(ResponseCode::NoError)),
            ("www.example.com.", RecordType::HTTPS, Some(ResponseCode::NoError)),
            ("www.example.com.", RecordType::ANY, Some(ResponseCode::NotImp)),
            ("www.example.com.", RecordType::AXFR, Some(ResponseCode::NotImp)),
        ] {
            assert_eq!(code(&ask(name, kind), &egress), outcome, "{name} {kind}");
        }
    }

    #[test]
    fn a_reply_without_room_is_only_its_head() {
        let Some(Decision::Ask(question)) = decide(
            &ask("www.example.com.", RecordType::A),
            Carrier::Datagram,
            &Egress::open(),
            Families::Ipv4,
        ) else {
            panic!("not asked");
        };
        let record = |n: u8| {
            let address = hickory_proto::rr::RData::A(hickory_proto::rr::rdata::A::new(192, 0, 2, n));
            Record::from_rdata(question.name().clone(), 60, address)
        };
        let small =
            Message::from_vec(&question.reply(vec![record(1)], ResponseCode::NoError).unwrap()).unwrap();
        assert_eq!((small.metadata.truncation, small.answers.len()), (false, 1));
        let large = question.reply((0..200).map(record).collect(), ResponseCode::NoError).unwrap();
        assert!(large.len() <= 512);
        assert!(Message::from_vec(&large).unwrap().metadata.truncation);
    }

    #[test]
    fn two_questions_in_one_or_an_answer_are_not_asked_on() {
        let mut two = Message::query();
        two.metadata.id = 77;
        two.add_query(Query::query(Name::from_ascii("a.").unwrap(), RecordType::A));
        two.add_query(Query::query(Name::from_ascii("b.").unwrap(), RecordType::A));
        assert_eq!(code(&two.to_vec().unwrap(), &Egress::open()), Some(ResponseCode::FormErr));
        let answer = Message::response(77, OpCode::Query).to_vec().unwrap();
        assert!(decide(&answer, Carrier::Datagram, &Egress::open(), Families::Ipv4).is_none());
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_guest_break_the_parser(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = decide(&bytes, Carrier::Datagram, &only("*.example.com"), Families::Both);
        }

        /// A good question with bytes changed: closer to the parser's corners than noise.
        #[test]
        fn a_closed_policy_passes_on_nothing_but_its_names(changes in prop::collection::vec((12usize..60, any::<u8>()), 0..6)) {
            let mut bytes = ask("www.example.com.", RecordType::A);
            for (at, value) in changes {
                if let Some(byte) = bytes.get_mut(at) { *byte = value; }
            }
            if let Some(Decision::Ask(question)) = decide(&bytes, Carrier::Datagram, &only("*.example.com"), Families::Both) {
                let name = question.name().to_ascii().to_ascii_lowercase();
                prop_assert!(name.trim_end_matches('.').ends_with(".example.com"), "{}", name);
            }
        }
    }
}
