//! Tables as the kernel takes them: messages of one transaction.

use super::expressions::{expressions, value};
#[cfg_attr(
    not(test),
    expect(clippy::wildcard_imports, reason = "it uses nearly every name, and all are the kernel's")
)]
use super::kernel::*;
use super::model::{Chain, Element, Family, KeyPart, Rule, Set, Table, TableId};
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

impl Family {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Inet => NFPROTO_INET,
            Self::Netdev => NFPROTO_NETDEV,
        }
    }
}
