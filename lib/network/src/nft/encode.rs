//! Tables as the kernel takes them: messages of one transaction.

#[expect(clippy::wildcard_imports, reason = "every name of it is used, and all are the kernel's")]
use super::kernel::*;
use super::model::{Action, Chain, Element, Family, Field, KeyPart, Match, Rule, Set, Table, TableId, Test};
use crate::netlink::{
    Attributes, Message, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NetlinkError, Socket,
};

/// Puts the table in place of whatever has its name, in one step: packets see the old rules or the new ones.
pub(crate) fn replace_table(socket: &mut Socket, table: &Table) -> Result<(), NetlinkError> {
    socket.batch(&transaction(replacement(table)))
}

/// Removes the table; success if there is none.
pub(crate) fn remove_table(socket: &mut Socket, table: &TableId) -> Result<(), NetlinkError> {
    socket.batch(&transaction(removal(table)))
}

/// Adds elements, or gives those that are there a new time-out.
pub(crate) fn add_elements<'a>(
    socket: &mut Socket,
    table: &TableId,
    set: &str,
    timed: impl IntoIterator<Item = (&'a Element, Option<std::time::Duration>)>,
) -> Result<(), NetlinkError> {
    let mut messages = Vec::new();
    for (element, time) in timed {
        let add =
            element_message(NFT_MSG_NEWSETELEM, table, set, element, time.map(|t| t.as_millis() as u64));
        // Adding leaves an old element's time as it is, and removing refuses what is not there: so add, remove, add.
        if time.is_some() {
            messages.push(add.clone());
            messages.push(element_message(NFT_MSG_DELSETELEM, table, set, element, None));
        }
        messages.push(add);
    }
    if messages.is_empty() { Ok(()) } else { socket.batch(&transaction(messages)) }
}

pub(crate) fn remove_elements<'a>(
    socket: &mut Socket,
    table: &TableId,
    set: &str,
    elements: impl IntoIterator<Item = &'a Element>,
) -> Result<(), NetlinkError> {
    let messages: Vec<Message> =
        elements.into_iter().map(|e| element_message(NFT_MSG_DELSETELEM, table, set, e, None)).collect();
    if messages.is_empty() { Ok(()) } else { socket.batch(&transaction(messages)) }
}

fn transaction(mut messages: Vec<Message>) -> Vec<Message> {
    // One answer is enough: refusals come for every message, success only when all has been done.
    if let Some(last) = messages.last_mut() {
        last.flags |= NLM_F_ACK;
    }
    let edge = |kind| Message { kind, flags: 0, body: vec![0, 0, 0, NFNL_SUBSYS_NFTABLES as u8] };
    let mut all = vec![edge(NFNL_MSG_BATCH_BEGIN)];
    all.append(&mut messages);
    all.push(edge(NFNL_MSG_BATCH_END));
    all
}

pub(super) fn message(
    kind: u16,
    flags: u16,
    family: Family,
    attributes: impl FnOnce(Attributes) -> Attributes,
) -> Message {
    let header = [family.number(), 0, 0, 0];
    Message {
        kind: NFNL_SUBSYS_NFTABLES << 8 | kind,
        flags,
        body: attributes(Attributes::after(&header)).into_bytes(),
    }
}

fn removal(table: &TableId) -> Vec<Message> {
    let named = |kind, flags| message(kind, flags, table.family, |a| a.text(NFTA_TABLE_NAME, &table.name));
    vec![named(NFT_MSG_NEWTABLE, NLM_F_CREATE), named(NFT_MSG_DELTABLE, 0)]
}

fn replacement(table: &Table) -> Vec<Message> {
    let mut messages = removal(&table.id);
    messages.push(message(NFT_MSG_NEWTABLE, NLM_F_CREATE, table.id.family, |a| {
        a.text(NFTA_TABLE_NAME, &table.id.name)
    }));
    for (number, set) in (1..).zip(&table.sets) {
        messages.push(set_message(&table.id, set, number));
        for element in &set.elements {
            messages.push(element_message(NFT_MSG_NEWSETELEM, &table.id, set.name, element, None));
        }
    }
    for chain in &table.chains {
        messages.push(chain_message(&table.id, chain));
        messages.extend(chain.rules.iter().map(|rule| rule_message(&table.id, chain, rule)));
    }
    messages
}

fn set_message(table: &TableId, set: &Set, number: u32) -> Message {
    let mut flags = 0;
    if set.timed {
        flags |= NFT_SET_TIMEOUT;
    }
    if !set.data.is_empty() {
        flags |= NFT_SET_MAP;
    }
    message(NFT_MSG_NEWSET, NLM_F_CREATE | NLM_F_EXCL, table.family, |a| {
        let a = a
            .text(NFTA_SET_TABLE, &table.name)
            .text(NFTA_SET_NAME, set.name)
            .u32(NFTA_SET_ID, number)
            .u32(NFTA_SET_FLAGS, flags)
            .u32(NFTA_SET_KEY_TYPE, type_of(&set.key))
            .u32(NFTA_SET_KEY_LEN, Set::key_length(&set.key))
            .nest(NFTA_SET_DESC, Attributes::default().u32(NFTA_SET_DESC_SIZE, set.size));
        if set.data.is_empty() {
            return a;
        }
        a.u32(NFTA_SET_DATA_TYPE, type_of(&set.data)).u32(NFTA_SET_DATA_LEN, Set::key_length(&set.data))
    })
}

fn type_of(parts: &[KeyPart]) -> u32 {
    parts.iter().fold(0, |all, part| {
        let one = match part {
            KeyPart::Ipv4 => TYPE_IPV4_ADDR,
            KeyPart::Ipv6 => TYPE_IPV6_ADDR,
            KeyPart::Transport => TYPE_INET_PROTO,
            KeyPart::Port => TYPE_INET_SERVICE,
        };
        all << TYPE_BITS | one
    })
}

fn element_message(
    kind: u16,
    table: &TableId,
    set: &str,
    element: &Element,
    milliseconds: Option<u64>,
) -> Message {
    let mut inner = Attributes::default().nest(NFTA_SET_ELEM_KEY, value(&element.key));
    if !element.data.is_empty() {
        inner = inner.nest(NFTA_SET_ELEM_DATA, value(&element.data));
    }
    if let Some(time) = milliseconds {
        inner = inner.u64(NFTA_SET_ELEM_TIMEOUT, time);
    }
    let flags = if kind == NFT_MSG_NEWSETELEM { NLM_F_CREATE } else { 0 };
    message(kind, flags, table.family, |a| {
        a.text(NFTA_SET_ELEM_LIST_TABLE, &table.name)
            .text(NFTA_SET_ELEM_LIST_SET, set)
            .nest(NFTA_SET_ELEM_LIST_ELEMENTS, Attributes::default().nest(NFTA_LIST_ELEM, inner))
    })
}

fn chain_message(table: &TableId, chain: &Chain) -> Message {
    let mut hook = Attributes::default()
        .u32(NFTA_HOOK_HOOKNUM, chain.hook.number())
        .u32(NFTA_HOOK_PRIORITY, chain.hook.priority().cast_unsigned());
    if let Some(device) = chain.hook.device() {
        hook = hook.text(NFTA_HOOK_DEV, device.as_str());
    }
    message(NFT_MSG_NEWCHAIN, NLM_F_CREATE | NLM_F_EXCL, table.family, |a| {
        a.text(NFTA_CHAIN_TABLE, &table.name)
            .text(NFTA_CHAIN_NAME, chain.name)
            .text(NFTA_CHAIN_TYPE, chain.hook.kind())
            .nest(NFTA_CHAIN_HOOK, hook)
            .u32(NFTA_CHAIN_POLICY, chain.policy.number())
    })
}

fn rule_message(table: &TableId, chain: &Chain, rule: &Rule) -> Message {
    let mut comment = rule.label().into_bytes();
    comment.push(0);
    let mut user_data = vec![NFTNL_UDATA_RULE_COMMENT, u8::try_from(comment.len()).unwrap_or(u8::MAX)];
    user_data.append(&mut comment);
    message(NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, table.family, |a| {
        a.text(NFTA_RULE_TABLE, &table.name)
            .text(NFTA_RULE_CHAIN, chain.name)
            .nest(NFTA_RULE_EXPRESSIONS, Attributes::after(&expressions(rule)))
            .bytes(NFTA_RULE_USERDATA, &user_data)
    })
}

/// What the rule does, as the list of expressions that the kernel runs.
pub(super) fn expressions(rule: &Rule) -> Vec<u8> {
    let mut list = Expressions(Attributes::default());
    for one in &rule.matches {
        match one {
            Match::Field(field, test) => {
                list.load(*field, 0);
                list.test(test);
            }
            Match::InSet(fields, set) => {
                list.load_all(fields);
                list.push(
                    "lookup",
                    Attributes::default().text(NFTA_LOOKUP_SET, set).u32(NFTA_LOOKUP_SREG, NFT_REG32_00),
                );
            }
        }
    }
    list.act(&rule.action);
    list.0.into_bytes()
}

struct Expressions(Attributes);

impl Expressions {
    fn push(&mut self, name: &str, data: Attributes) {
        let expression = Attributes::default().text(NFTA_EXPR_NAME, name).nest(NFTA_EXPR_DATA, data);
        self.0 = std::mem::take(&mut self.0).nest(NFTA_LIST_ELEM, expression);
    }

    /// Loads a field into the register that is so many words behind the first; returns the words it takes.
    fn load(&mut self, field: Field, word: u32) -> u32 {
        let register = NFT_REG32_00 + word;
        let meta = |key| Attributes::default().u32(NFTA_META_KEY, key).u32(NFTA_META_DREG, register);
        let ct = |key| Attributes::default().u32(NFTA_CT_KEY, key).u32(NFTA_CT_DREG, register);
        let payload = |base, offset, length| {
            Attributes::default()
                .u32(NFTA_PAYLOAD_DREG, register)
                .u32(NFTA_PAYLOAD_BASE, base)
                .u32(NFTA_PAYLOAD_OFFSET, offset)
                .u32(NFTA_PAYLOAD_LEN, length)
        };
        let (name, data, words) = match field {
            Field::InDevice => ("meta", meta(NFT_META_IIFNAME), 4),
            Field::OutDevice => ("meta", meta(NFT_META_OIFNAME), 4),
            Field::IpVersion => ("meta", meta(NFT_META_NFPROTO), 1),
            Field::EtherType => ("meta", meta(NFT_META_PROTOCOL), 1),
            Field::Transport => ("meta", meta(NFT_META_L4PROTO), 1),
            Field::EtherSource => ("payload", payload(NFT_PAYLOAD_LL_HEADER, 6, 6), 2),
            Field::ArpSenderMac => ("payload", payload(NFT_PAYLOAD_NETWORK_HEADER, 8, 6), 2),
            Field::ArpSenderAddress => ("payload", payload(NFT_PAYLOAD_NETWORK_HEADER, 14, 4), 1),
            Field::Source4 => ("payload", payload(NFT_PAYLOAD_NETWORK_HEADER, 12, 4), 1),
            Field::Destination4 => ("payload", payload(NFT_PAYLOAD_NETWORK_HEADER, 16, 4), 1),
            Field::Source6 => ("payload", payload(NFT_PAYLOAD_NETWORK_HEADER, 8, 16), 4),
            Field::Destination6 => ("payload", payload(NFT_PAYLOAD_NETWORK_HEADER, 24, 16), 4),
            Field::DestinationPort => ("payload", payload(NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2), 1),
            Field::IcmpType => ("payload", payload(NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1), 1),
            Field::ConnectionState => ("ct", ct(NFT_CT_STATE), 1),
            Field::ConnectionStatus => ("ct", ct(NFT_CT_STATUS), 1),
            Field::DestinationKind => (
                "fib",
                Attributes::default()
                    .u32(NFTA_FIB_DREG, register)
                    .u32(NFTA_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE)
                    .u32(NFTA_FIB_FLAGS, NFTA_FIB_F_DADDR),
                1,
            ),
        };
        self.push(name, data);
        words
    }

    fn load_all(&mut self, fields: &[Field]) {
        fields.iter().fold(0, |word, field| word + self.load(*field, word));
    }

    fn test(&mut self, test: &Test) {
        match test {
            Test::Is(expected) => self.compare(NFT_CMP_EQ, expected),
            Test::IsNot(unexpected) => self.compare(NFT_CMP_NEQ, unexpected),
            Test::Within(address, prefix) => {
                self.mask(&mask_of(address.len(), *prefix));
                self.compare(NFT_CMP_EQ, address);
            }
            Test::NotWithin(address, prefix) => {
                self.mask(&mask_of(address.len(), *prefix));
                self.compare(NFT_CMP_NEQ, address);
            }
            Test::AnyOf(bits) => {
                self.mask(&bits.to_ne_bytes());
                self.compare(NFT_CMP_NEQ, &[0; 4]);
            }
            Test::Between(first, last) => self.push(
                "range",
                Attributes::default()
                    .u32(NFTA_RANGE_SREG, NFT_REG32_00)
                    .u32(NFTA_RANGE_OP, NFT_RANGE_EQ)
                    .nest(NFTA_RANGE_FROM_DATA, value(first))
                    .nest(NFTA_RANGE_TO_DATA, value(last)),
            ),
        }
    }

    fn compare(&mut self, how: u32, with: &[u8]) {
        let data = Attributes::default()
            .u32(NFTA_CMP_SREG, NFT_REG32_00)
            .u32(NFTA_CMP_OP, how)
            .nest(NFTA_CMP_DATA, value(with));
        self.push("cmp", data);
    }

    fn mask(&mut self, mask: &[u8]) {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        let data = Attributes::default()
            .u32(NFTA_BITWISE_SREG, NFT_REG32_00)
            .u32(NFTA_BITWISE_DREG, NFT_REG32_00)
            .u32(NFTA_BITWISE_LEN, length)
            .nest(NFTA_BITWISE_MASK, value(mask))
            .nest(NFTA_BITWISE_XOR, value(&vec![0; mask.len()]));
        self.push("bitwise", data);
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Accept => self.verdict(NF_ACCEPT),
            Action::Drop => self.verdict(NF_DROP),
            Action::Reject => self.push(
                "reject",
                Attributes::default()
                    .u32(NFTA_REJECT_TYPE, NFT_REJECT_ICMPX_UNREACH)
                    .bytes(NFTA_REJECT_ICMP_CODE, &[NFT_REJECT_ICMPX_ADMIN_PROHIBITED]),
            ),
            Action::Masquerade => self.push("masq", Attributes::default()),
            Action::SendTo(address, port) => {
                let (family, octets, words) = match address {
                    std::net::IpAddr::V4(a) => (NFPROTO_IPV4, a.octets().to_vec(), 1),
                    std::net::IpAddr::V6(a) => (NFPROTO_IPV6, a.octets().to_vec(), 4),
                };
                self.immediate(NFT_REG32_00, &octets);
                self.immediate(NFT_REG32_00 + words, &port.to_be_bytes());
                self.redirect(family, words);
            }
            Action::SendByMap(fields, map) => {
                self.load_all(fields);
                self.push(
                    "lookup",
                    Attributes::default()
                        .text(NFTA_LOOKUP_SET, map)
                        .u32(NFTA_LOOKUP_SREG, NFT_REG32_00)
                        .u32(NFTA_LOOKUP_DREG, NFT_REG32_00),
                );
                self.redirect(NFPROTO_IPV4, 1);
            }
        }
    }

    /// Changes the destination to the address in the first register and the port so many words behind it.
    fn redirect(&mut self, family: u8, words: u32) {
        let data = Attributes::default()
            .u32(NFTA_NAT_TYPE, NFT_NAT_DNAT)
            .u32(NFTA_NAT_FAMILY, family.into())
            .u32(NFTA_NAT_REG_ADDR_MIN, NFT_REG32_00)
            .u32(NFTA_NAT_REG_PROTO_MIN, NFT_REG32_00 + words);
        self.push("nat", data);
    }

    fn immediate(&mut self, register: u32, bytes: &[u8]) {
        let data =
            Attributes::default().u32(NFTA_IMMEDIATE_DREG, register).nest(NFTA_IMMEDIATE_DATA, value(bytes));
        self.push("immediate", data);
    }

    fn verdict(&mut self, code: u32) {
        let verdict =
            Attributes::default().nest(NFTA_DATA_VERDICT, Attributes::default().u32(NFTA_VERDICT_CODE, code));
        let data = Attributes::default()
            .u32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT)
            .nest(NFTA_IMMEDIATE_DATA, verdict);
        self.push("immediate", data);
    }
}

fn value(bytes: &[u8]) -> Attributes {
    Attributes::default().bytes(NFTA_DATA_VALUE, bytes)
}

fn mask_of(length: usize, prefix: u8) -> Vec<u8> {
    (0..length)
        .map(|byte| {
            let bits = usize::from(prefix).saturating_sub(byte * 8).min(8);
            0xffu16.checked_shl(8 - bits as u32).unwrap_or_default() as u8
        })
        .collect()
}

impl Family {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Inet => NFPROTO_INET,
            Self::Netdev => NFPROTO_NETDEV,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_the_prefixs_bits() {
        assert_eq!(mask_of(4, 0), [0, 0, 0, 0]);
        assert_eq!(mask_of(4, 10), [0xff, 0xc0, 0, 0]);
        assert_eq!(mask_of(4, 32), [0xff; 4]);
        assert_eq!(mask_of(16, 64)[7..9], [0xff, 0]);
    }
}
