//! What rules do, as the small programs that the kernel runs for each packet.

#[cfg_attr(
    not(test),
    expect(clippy::wildcard_imports, reason = "it uses nearly every name, and all are the kernel's")
)]
use super::kernel::*;
use super::model::{Action, Field, IpVersion, Match, Rule, Test};
use crate::netlink::Attributes;

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
            Match::ConnectionsOver(count) => list.push(
                "connlimit",
                Attributes::default()
                    .u32(NFTA_CONNLIMIT_COUNT, *count)
                    .u32(NFTA_CONNLIMIT_FLAGS, NFT_CONNLIMIT_F_INV),
            ),
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
            Action::SendByMap(fields, map, version) => {
                self.load_all(fields);
                self.push(
                    "lookup",
                    Attributes::default()
                        .text(NFTA_LOOKUP_SET, map)
                        .u32(NFTA_LOOKUP_SREG, NFT_REG32_00)
                        .u32(NFTA_LOOKUP_DREG, NFT_REG32_00),
                );
                match version {
                    IpVersion::V4 => self.redirect(NFPROTO_IPV4, 1),
                    IpVersion::V6 => self.redirect(NFPROTO_IPV6, 4),
                }
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

pub(super) fn value(bytes: &[u8]) -> Attributes {
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
