//! What the kernel has: our tables' shapes, and the elements of our sets.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;

use super::encode::message;
use super::kernel::{
    NF_DROP, NFNL_SUBSYS_NFTABLES, NFPROTO_INET, NFPROTO_IPV4, NFPROTO_IPV6, NFT_MSG_GETCHAIN,
    NFT_MSG_GETRULE, NFT_MSG_GETSET, NFT_MSG_GETSETELEM, NFT_MSG_GETTABLE, NFT_MSG_NEWCHAIN, NFT_MSG_NEWRULE,
    NFT_MSG_NEWSET, NFT_MSG_NEWSETELEM, NFT_MSG_NEWTABLE, NFTA_CHAIN_HOOK, NFTA_CHAIN_NAME,
    NFTA_CHAIN_POLICY, NFTA_CHAIN_TABLE, NFTA_CHAIN_TYPE, NFTA_DATA_VALUE, NFTA_HOOK_DEV, NFTA_HOOK_HOOKNUM,
    NFTA_HOOK_PRIORITY, NFTA_RULE_CHAIN, NFTA_RULE_TABLE, NFTA_RULE_USERDATA, NFTA_SET_ELEM_DATA,
    NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_LIST_ELEMENTS, NFTA_SET_ELEM_LIST_SET, NFTA_SET_ELEM_LIST_TABLE,
    NFTA_SET_NAME, NFTA_SET_TABLE, NFTA_TABLE_NAME, NFTNL_UDATA_RULE_COMMENT,
};
use super::model::{ChainShape, Element, Family, TableId, TableShape};
use crate::netlink::{Message, NetlinkError, Socket, attributes};

/// In front of the attributes: family, version, resource.
const HEADER: usize = 4;

/// The tables of this name, of both families, and their shapes.
pub(crate) fn tables_named(
    socket: &mut Socket,
    name: &str,
) -> Result<BTreeMap<TableId, TableShape>, NetlinkError> {
    let mut found = BTreeMap::new();
    for family in [Family::Inet, Family::Netdev] {
        let id = TableId { family, name: name.to_owned() };
        let tables = list(socket, NFT_MSG_NEWTABLE, message(NFT_MSG_GETTABLE, 0, family, |a| a))?;
        if tables.iter().any(|table| text(table, NFTA_TABLE_NAME).as_deref() == Some(name)) {
            match shape(socket, &id) {
                Ok(shape) => drop(found.insert(id, shape)),
                // Removed since it was listed.
                Err(error) if error.is(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}

fn shape(socket: &mut Socket, table: &TableId) -> Result<TableShape, NetlinkError> {
    let ours = |item: &Vec<u8>, kind| text(item, kind).as_deref() == Some(table.name.as_str());
    let mut shape = TableShape::default();
    for chain in list(socket, NFT_MSG_NEWCHAIN, message(NFT_MSG_GETCHAIN, 0, table.family, |a| a))? {
        if ours(&chain, NFTA_CHAIN_TABLE) {
            let name = text(&chain, NFTA_CHAIN_NAME).unwrap_or_default();
            shape.chains.insert(name, ChainShape { hook: hook_of(&chain), rules: Vec::new() });
        }
    }
    let rules = message(NFT_MSG_GETRULE, 0, table.family, |a| a.text(NFTA_RULE_TABLE, &table.name));
    for rule in list(socket, NFT_MSG_NEWRULE, rules)? {
        if ours(&rule, NFTA_RULE_TABLE) {
            let chain = text(&rule, NFTA_RULE_CHAIN).unwrap_or_default();
            shape.chains.entry(chain).or_default().rules.push(comment_of(&rule));
        }
    }
    let sets = message(NFT_MSG_GETSET, 0, table.family, |a| a.text(NFTA_SET_TABLE, &table.name));
    for set in list(socket, NFT_MSG_NEWSET, sets)? {
        if ours(&set, NFTA_SET_TABLE) {
            shape.sets.extend(text(&set, NFTA_SET_NAME));
        }
    }
    Ok(shape)
}

/// Chains of other tables that everything forwarded comes through and that drop what none of their rules accepts:
/// family, table and chain, as `nft` is told them.
pub(crate) fn dropping_forward_chains(socket: &mut Socket, own: &str) -> Result<Vec<String>, NetlinkError> {
    const NF_INET_FORWARD: u32 = 2;
    let mut found = Vec::new();
    for (family, name) in [(NFPROTO_INET, "inet"), (NFPROTO_IPV4, "ip"), (NFPROTO_IPV6, "ip6")] {
        let request = Message {
            kind: NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN,
            flags: 0,
            body: vec![family, 0, 0, 0],
        };
        for chain in list(socket, NFT_MSG_NEWCHAIN, request)? {
            let table = text(&chain, NFTA_CHAIN_TABLE).unwrap_or_default();
            let hook = find(&chain, NFTA_CHAIN_HOOK).map(|hook| number(hook, NFTA_HOOK_HOOKNUM));
            if hook == Some(NF_INET_FORWARD) && number(&chain, NFTA_CHAIN_POLICY) == NF_DROP && table != own {
                found.push(format!("{name} {table} {}", text(&chain, NFTA_CHAIN_NAME).unwrap_or_default()));
            }
        }
    }
    Ok(found)
}

/// The elements of one of our sets or maps.
pub(crate) fn elements(
    socket: &mut Socket,
    table: &TableId,
    set: &str,
) -> Result<BTreeSet<Element>, NetlinkError> {
    let request = message(NFT_MSG_GETSETELEM, 0, table.family, |a| {
        a.text(NFTA_SET_ELEM_LIST_TABLE, &table.name).text(NFTA_SET_ELEM_LIST_SET, set)
    });
    let parts = match list(socket, NFT_MSG_NEWSETELEM, request) {
        // The table was removed since it was listed.
        Err(error) if error.is(Errno::NOENT) => Vec::new(),
        parts => parts?,
    };
    let elements = parts
        .iter()
        .filter_map(|part| find(part, NFTA_SET_ELEM_LIST_ELEMENTS))
        .flat_map(attributes)
        .map(|(_, element)| Element {
            key: data_of(element, NFTA_SET_ELEM_KEY),
            data: data_of(element, NFTA_SET_ELEM_DATA),
        })
        .collect();
    Ok(elements)
}

/// The attributes of each item that a dump lists.
fn list(socket: &mut Socket, kind: u16, request: Message) -> Result<Vec<Vec<u8>>, NetlinkError> {
    let parts = socket.dump(&request)?;
    let items = parts
        .into_iter()
        .filter(|(found, _)| *found == NFNL_SUBSYS_NFTABLES << 8 | kind)
        .map(|(_, body)| body.get(HEADER..).unwrap_or_default().to_vec())
        .collect();
    Ok(items)
}

fn find(item: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(item).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

fn text(item: &[u8], kind: u16) -> Option<String> {
    let bytes = find(item, kind)?;
    Some(String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned())
}

fn number(item: &[u8], kind: u16) -> u32 {
    find(item, kind)
        .and_then(|bytes| bytes.first_chunk())
        .map_or(u32::MAX, |bytes| u32::from_be_bytes(*bytes))
}

fn data_of(element: &[u8], kind: u16) -> Vec<u8> {
    find(element, kind).and_then(|data| find(data, NFTA_DATA_VALUE)).unwrap_or_default().to_vec()
}

fn hook_of(chain: &[u8]) -> String {
    let hook = find(chain, NFTA_CHAIN_HOOK).unwrap_or_default();
    ChainShape::hook_text(
        &text(chain, NFTA_CHAIN_TYPE).unwrap_or_default(),
        number(hook, NFTA_HOOK_HOOKNUM),
        number(hook, NFTA_HOOK_PRIORITY).cast_signed(),
        &text(hook, NFTA_HOOK_DEV).unwrap_or_default(),
        number(chain, NFTA_CHAIN_POLICY),
    )
}

/// The comment in a rule's user data: type, length and value, one behind the other.
fn comment_of(rule: &[u8]) -> String {
    let mut rest = find(rule, NFTA_RULE_USERDATA).unwrap_or_default();
    while let [kind, length, tail @ ..] = rest {
        let Some((value, after)) = tail.split_at_checked(usize::from(*length)) else { break };
        if *kind == NFTNL_UDATA_RULE_COMMENT {
            return String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
        }
        rest = after;
    }
    String::new()
}
