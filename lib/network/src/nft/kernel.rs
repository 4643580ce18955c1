//! Numbers of <linux/netfilter/nf_tables.h> and its neighbours, under the kernel's names.

pub(super) const NFNL_SUBSYS_NFTABLES: u16 = 10;
pub(super) const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
pub(super) const NFNL_MSG_BATCH_END: u16 = 0x11;

pub(super) const NFT_MSG_NEWTABLE: u16 = 0;
pub(super) const NFT_MSG_GETTABLE: u16 = 1;
pub(super) const NFT_MSG_DELTABLE: u16 = 2;
pub(super) const NFT_MSG_NEWCHAIN: u16 = 3;
pub(super) const NFT_MSG_GETCHAIN: u16 = 4;
pub(super) const NFT_MSG_NEWRULE: u16 = 6;
pub(super) const NFT_MSG_GETRULE: u16 = 7;
pub(super) const NFT_MSG_NEWSET: u16 = 9;
pub(super) const NFT_MSG_GETSET: u16 = 10;
pub(super) const NFT_MSG_NEWSETELEM: u16 = 12;
pub(super) const NFT_MSG_GETSETELEM: u16 = 13;
pub(super) const NFT_MSG_DELSETELEM: u16 = 14;

pub(super) const NFTA_LIST_ELEM: u16 = 1;
pub(super) const NFTA_TABLE_NAME: u16 = 1;
pub(super) const NFTA_CHAIN_TABLE: u16 = 1;
pub(super) const NFTA_CHAIN_NAME: u16 = 3;
pub(super) const NFTA_CHAIN_HOOK: u16 = 4;
pub(super) const NFTA_CHAIN_POLICY: u16 = 5;
pub(super) const NFTA_CHAIN_TYPE: u16 = 7;
pub(super) const NFTA_HOOK_HOOKNUM: u16 = 1;
pub(super) const NFTA_HOOK_PRIORITY: u16 = 2;
pub(super) const NFTA_HOOK_DEV: u16 = 3;
pub(super) const NFTA_RULE_TABLE: u16 = 1;
pub(super) const NFTA_RULE_CHAIN: u16 = 2;
pub(super) const NFTA_RULE_EXPRESSIONS: u16 = 4;
pub(super) const NFTA_RULE_USERDATA: u16 = 7;
pub(super) const NFTA_SET_TABLE: u16 = 1;
pub(super) const NFTA_SET_NAME: u16 = 2;
pub(super) const NFTA_SET_FLAGS: u16 = 3;
pub(super) const NFTA_SET_KEY_TYPE: u16 = 4;
pub(super) const NFTA_SET_KEY_LEN: u16 = 5;
pub(super) const NFTA_SET_DATA_TYPE: u16 = 6;
pub(super) const NFTA_SET_DATA_LEN: u16 = 7;
pub(super) const NFTA_SET_DESC: u16 = 9;
pub(super) const NFTA_SET_ID: u16 = 10;
pub(super) const NFTA_SET_DESC_SIZE: u16 = 1;
pub(super) const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
pub(super) const NFTA_SET_ELEM_LIST_SET: u16 = 2;
pub(super) const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
pub(super) const NFTA_SET_ELEM_KEY: u16 = 1;
pub(super) const NFTA_SET_ELEM_DATA: u16 = 2;
pub(super) const NFTA_SET_ELEM_TIMEOUT: u16 = 4;
pub(super) const NFT_SET_MAP: u32 = 0x8;
pub(super) const NFT_SET_TIMEOUT: u32 = 0x10;

pub(super) const NFTA_DATA_VALUE: u16 = 1;
pub(super) const NFTA_DATA_VERDICT: u16 = 2;
pub(super) const NFTA_VERDICT_CODE: u16 = 1;
pub(super) const NFTA_EXPR_NAME: u16 = 1;
pub(super) const NFTA_EXPR_DATA: u16 = 2;
pub(super) const NFTA_IMMEDIATE_DREG: u16 = 1;
pub(super) const NFTA_IMMEDIATE_DATA: u16 = 2;
pub(super) const NFTA_BITWISE_SREG: u16 = 1;
pub(super) const NFTA_BITWISE_DREG: u16 = 2;
pub(super) const NFTA_BITWISE_LEN: u16 = 3;
pub(super) const NFTA_BITWISE_MASK: u16 = 4;
pub(super) const NFTA_BITWISE_XOR: u16 = 5;
pub(super) const NFTA_CMP_SREG: u16 = 1;
pub(super) const NFTA_CMP_OP: u16 = 2;
pub(super) const NFTA_CMP_DATA: u16 = 3;
pub(super) const NFTA_RANGE_SREG: u16 = 1;
pub(super) const NFTA_RANGE_OP: u16 = 2;
pub(super) const NFTA_RANGE_FROM_DATA: u16 = 3;
pub(super) const NFTA_RANGE_TO_DATA: u16 = 4;
pub(super) const NFTA_LOOKUP_SET: u16 = 1;
pub(super) const NFTA_LOOKUP_SREG: u16 = 2;
pub(super) const NFTA_LOOKUP_DREG: u16 = 3;
pub(super) const NFTA_PAYLOAD_DREG: u16 = 1;
pub(super) const NFTA_PAYLOAD_BASE: u16 = 2;
pub(super) const NFTA_PAYLOAD_OFFSET: u16 = 3;
pub(super) const NFTA_PAYLOAD_LEN: u16 = 4;
pub(super) const NFTA_META_DREG: u16 = 1;
pub(super) const NFTA_META_KEY: u16 = 2;
pub(super) const NFTA_CT_DREG: u16 = 1;
pub(super) const NFTA_CT_KEY: u16 = 2;
pub(super) const NFTA_FIB_DREG: u16 = 1;
pub(super) const NFTA_FIB_RESULT: u16 = 2;
pub(super) const NFTA_FIB_FLAGS: u16 = 3;
pub(super) const NFTA_REJECT_TYPE: u16 = 1;
pub(super) const NFTA_REJECT_ICMP_CODE: u16 = 2;
pub(super) const NFTA_CONNLIMIT_COUNT: u16 = 1;
pub(super) const NFTA_CONNLIMIT_FLAGS: u16 = 2;
pub(super) const NFTA_NAT_TYPE: u16 = 1;
pub(super) const NFTA_NAT_FAMILY: u16 = 2;
pub(super) const NFTA_NAT_REG_ADDR_MIN: u16 = 3;
pub(super) const NFTA_NAT_REG_PROTO_MIN: u16 = 5;

pub(super) const NFT_REG_VERDICT: u32 = 0;
/// Sixteen registers of 4 bytes from here on.
pub(super) const NFT_REG32_00: u32 = 8;
pub(super) const NFT_CMP_EQ: u32 = 0;
pub(super) const NFT_CMP_NEQ: u32 = 1;
pub(super) const NFT_RANGE_EQ: u32 = 0;
pub(super) const NFT_REJECT_ICMPX_UNREACH: u32 = 2;
pub(super) const NFT_REJECT_ICMPX_ADMIN_PROHIBITED: u8 = 3;
pub(super) const NFT_NAT_DNAT: u32 = 1;
/// Without it the rule holds up to the count, with it from there on.
pub(super) const NFT_CONNLIMIT_F_INV: u32 = 1;

pub(super) const NFT_PAYLOAD_LL_HEADER: u32 = 0;
pub(super) const NFT_PAYLOAD_NETWORK_HEADER: u32 = 1;
pub(super) const NFT_PAYLOAD_TRANSPORT_HEADER: u32 = 2;
pub(super) const NFT_META_PROTOCOL: u32 = 1;
pub(super) const NFT_META_IIFNAME: u32 = 6;
pub(super) const NFT_META_OIFNAME: u32 = 7;
pub(super) const NFT_META_NFPROTO: u32 = 15;
pub(super) const NFT_META_L4PROTO: u32 = 16;
pub(super) const NFT_CT_STATE: u32 = 0;
pub(super) const NFT_CT_STATUS: u32 = 2;
pub(super) const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
pub(super) const NFTA_FIB_F_DADDR: u32 = 2;

pub(super) const NFPROTO_INET: u8 = 1;
pub(super) const NFPROTO_IPV4: u8 = 2;
pub(super) const NFPROTO_NETDEV: u8 = 5;
pub(super) const NFPROTO_IPV6: u8 = 10;
pub(super) const NF_DROP: u32 = 0;
pub(super) const NF_ACCEPT: u32 = 1;

/// A rule's user data that `nft` shows as its comment.
pub(super) const NFTNL_UDATA_RULE_COMMENT: u8 = 0;

// How nft itself numbers the types of keys, so that it can show them.
pub(super) const TYPE_IPV4_ADDR: u32 = 7;
pub(super) const TYPE_IPV6_ADDR: u32 = 8;
pub(super) const TYPE_INET_PROTO: u32 = 12;
pub(super) const TYPE_INET_SERVICE: u32 = 13;
pub(super) const TYPE_BITS: u32 = 6;
