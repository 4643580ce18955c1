//! Whether VMs can have bridge networks here, found out by making what they need where it is gone afterwards.

use std::path::Path;

use super::book::Book;
use crate::doctor::{Check, Verdict};
use crate::layout::Layout;
use crate::vm::chain;
use crate::vmm::drivers::User;

const NAME: &str = "bridge";
/// The first VM turns it on for the devices of the default routes, which takes a kernel that lets itself be told.
const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";

pub(crate) fn bridge(layout: &Layout) -> Check {
    if User::of_this_process() == User::Ordinary {
        let found = "taps need CAP_NET_ADMIN and CAP_SYS_ADMIN, which this process does not have".to_owned();
        return degraded("run imp as root to have bridge networks".to_owned(), found);
    }
    if let Err(error) = imp_network::trial() {
        let modules = "tun veth nf_tables nft_ct nft_nat nft_masq nft_reject_inet nft_fib_inet nft_connlimit";
        return degraded(format!("modprobe -a {modules}"), chain(&error));
    }
    if rustix::fs::access(FORWARDING, rustix::fs::Access::WRITE_OK).is_err() {
        let found = format!("{FORWARDING} cannot be written: this host does not route for its VMs");
        return degraded("mount -o remount,rw /proc/sys".to_owned(), found);
    }
    let book = match Book::read(&layout.networks()) {
        Ok(book) => book,
        Err(error) => {
            let repair = format!("rm {}", layout.networks().display());
            return degraded(repair, chain(&error));
        }
    };
    let site = book.as_ref().map_or_else(super::book::any_site, |book| book.site.clone());
    match imp_network::obstacles(&site) {
        Ok(chains) if chains.is_empty() => {}
        Ok(chains) => return firewall(&chains),
        Err(error) => return degraded("modprobe nf_tables".to_owned(), chain(&error)),
    }
    let pool = match &book {
        Some(book) => format!("addresses from {}", book.addresses.pool().ipv4()),
        None => "addresses are chosen for the first VM".to_owned(),
    };
    let found =
        format!("tap, filters and address translation were made in a trial; {pool}; {}", forwarding());
    Check { name: NAME, verdict: Verdict::Good, found }
}

fn forwarding() -> &'static str {
    match std::fs::read_to_string(Path::new(FORWARDING)) {
        Ok(text) if text.trim() == "1" => "this host forwards",
        Ok(_) | Err(_) => "forwarding is turned on with the first VM",
    }
}

fn firewall(chains: &[String]) -> Check {
    let rules = |chain: &String| {
        ["iifname", "oifname"]
            .map(|device| format!("nft insert rule {chain} {device} 'imp*' accept"))
            .join("; ")
    };
    let repair = chains.iter().map(rules).collect::<Vec<_>>().join("; ");
    degraded(repair, format!("a firewall drops what VMs send and get: {}", chains.join(", ")))
}

fn degraded(repair: String, found: String) -> Check {
    Check { name: NAME, verdict: Verdict::Degraded { repair: Some(repair) }, found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_firewall_that_drops_comes_with_the_rules_that_let_vms_through() {
        let Verdict::Degraded { repair } = firewall(&["ip filter FORWARD".to_owned()]).verdict else {
            panic!()
        };
        assert_eq!(
            repair.unwrap(),
            "nft insert rule ip filter FORWARD iifname 'imp*' accept; nft insert rule ip filter FORWARD oifname 'imp*' accept"
        );
    }
}
