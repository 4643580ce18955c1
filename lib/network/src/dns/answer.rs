//! What an answer of a name server opens, and what of it the guest is told: pure.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, Record};

use super::question::Question;
use crate::egress::{Egress, Otherwise};
use crate::opening::Opening;

/// The guest is told to ask again within the hour, so what is open is known to be needed.
const LONGEST_TIME_TO_LIVE: u32 = 3600;
/// A name that changes every second still leaves time to connect.
const SHORTEST_OPENING: u32 = 60;
/// Programs hold on to an address for a while after its time.
const GRACE: u32 = 60;
/// Of one answer.
const MOST_RECORDS: usize = 64;
/// Aliases that lead from one to the next.
const LONGEST_CHAIN: usize = 16;

#[derive(Debug)]
pub(super) struct Judged {
    pub(super) code: ResponseCode,
    pub(super) records: Vec<Record>,
    pub(super) openings: Vec<Opening>,
}

/// Under a closed policy only addresses that the name leads to, by aliases too, and that it may open are told and opened.
pub(super) fn judge(question: &Question, answer: Message, egress: &Egress) -> Judged {
    let code = answer.metadata.response_code;
    let owners = chain(question.name(), &answer.answers);
    let mut judged = Judged { code, records: Vec::new(), openings: Vec::new() };
    for mut record in answer.answers {
        if judged.records.len() == MOST_RECORDS || !owners.contains(&record.name) {
            continue;
        }
        record.ttl = record.ttl.min(LONGEST_TIME_TO_LIVE);
        let address = match &record.data {
            RData::A(a) => Some(IpAddr::V4(a.0)),
            RData::AAAA(a) => Some(IpAddr::V6(a.0)),
            _ => None,
        };
        match (address, egress.otherwise, question.domain()) {
            (Some(address), Otherwise::Refuse, Some(domain)) => {
                let opened = egress.opened_by(domain, address);
                if opened.is_empty() {
                    continue;
                }
                let time = Duration::from_secs((record.ttl.max(SHORTEST_OPENING) + GRACE).into());
                judged.openings.extend(opened.into_iter().map(|ports| Opening {
                    address,
                    ports: ports.clone(),
                    time,
                }));
            }
            (Some(_), Otherwise::Refuse, None) => continue,
            (None, _, _) | (_, Otherwise::Allow, _) => {}
        }
        judged.records.push(record);
    }
    judged
}

/// The name and the aliases that it leads to.
fn chain(name: &Name, records: &[Record]) -> BTreeSet<Name> {
    let mut owners = BTreeSet::from([name.clone()]);
    let mut last = name.clone();
    for _ in 0..LONGEST_CHAIN {
        let next = records.iter().find_map(|record| match &record.data {
            RData::CNAME(to) if record.name == last => Some(to.0.clone()),
            _ => None,
        });
        match next {
            Some(next) if owners.insert(next.clone()) => last = next,
            Some(_) | None => break,
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{OpCode, Query};
    use hickory_proto::rr::RecordType;
    use hickory_proto::rr::rdata::{A, CNAME};

    use super::*;
    use crate::dns::Families;
    use crate::dns::question::{Carrier, Decision, decide};
    use crate::egress::{Allow, Ports, Scope};

    fn question(egress: &Egress) -> Question {
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii("www.example.com.").unwrap(), RecordType::A));
        match decide(&message.to_vec().unwrap(), Carrier::Datagram, egress, Families::Ipv4) {
            Some(Decision::Ask(question)) => question,
            other => panic!("{other:?}"),
        }
    }

    fn a(name: &str, address: [u8; 4], ttl: u32) -> Record {
        Record::from_rdata(Name::from_ascii(name).unwrap(), ttl, RData::A(A(address.into())))
    }

    fn alias(name: &str, to: &str) -> Record {
        Record::from_rdata(
            Name::from_ascii(name).unwrap(),
            60,
            RData::CNAME(CNAME(Name::from_ascii(to).unwrap())),
        )
    }

    fn answer(records: Vec<Record>) -> Message {
        let mut message = Message::response(1, OpCode::Query);
        message.add_answers(records);
        message
    }

    fn closed() -> Egress {
        let name = "www.example.com".parse().unwrap();
        Egress::only(vec![Allow::Name { name, ports: Ports::Any, scope: Scope::Public }])
    }

    fn opened(records: Vec<Record>) -> Vec<(String, u64)> {
        let judged = judge(&question(&closed()), answer(records), &closed());
        let addresses = judged.records.iter().filter(|r| matches!(r.data, RData::A(_))).count();
        assert_eq!(addresses, judged.openings.len(), "the guest is told what is open, and nothing else");
        judged.openings.iter().map(|o| (o.address.to_string(), o.time.as_secs())).collect()
    }

    #[test]
    fn aliases_lead_to_what_opens_and_strangers_do_not() {
        let found = opened(vec![
            alias("www.example.com.", "cdn.example.net."),
            a("cdn.example.net.", [93, 184, 216, 34], 600),
            a("other.example.net.", [93, 184, 216, 35], 600),
        ]);
        assert_eq!(found, [("93.184.216.34".to_owned(), 660)]);
    }

    #[test]
    fn time_is_kept_within_bounds() {
        assert_eq!(opened(vec![a("www.example.com.", [1, 1, 1, 1], 0)]), [("1.1.1.1".to_owned(), 120)]);
        assert_eq!(
            opened(vec![a("www.example.com.", [1, 1, 1, 1], u32::MAX)]),
            [("1.1.1.1".to_owned(), 3660)]
        );
    }

    #[test]
    fn private_addresses_are_neither_told_nor_opened() {
        assert_eq!(
            opened(vec![
                a("www.example.com.", [10, 0, 0, 1], 60),
                a("www.example.com.", [169, 254, 169, 254], 60)
            ]),
            []
        );
    }

    #[test]
    fn aliases_in_a_circle_and_answers_without_end_are_cut() {
        let circle =
            vec![alias("www.example.com.", "b."), alias("b.", "www.example.com."), a("b.", [1, 1, 1, 1], 60)];
        assert_eq!(opened(circle).len(), 1);
        let many = (0..1000u32).map(|n| a("www.example.com.", (0x0101_0000 + n).to_be_bytes(), 60)).collect();
        assert_eq!(opened(many).len(), 64);
    }

    #[test]
    fn an_open_policy_tells_all_and_opens_nothing() {
        let judged = judge(
            &question(&Egress::open()),
            answer(vec![a("www.example.com.", [10, 0, 0, 1], 60)]),
            &Egress::open(),
        );
        assert_eq!((judged.records.len(), judged.openings.len()), (1, 0));
    }
}
