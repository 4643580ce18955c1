//! What a VM on a bridge network may reach, as its user says it; the engine's own tests do the same with every driver.

use imp_testkit::world::{self, HOST, PRIVATE_SERVER, PUBLIC_SERVER};

use crate::promises::network::{IMAGE, asks, in_a_world, run};

#[test]
fn what_is_denied_is_not_reached_and_what_is_allowed_is_all_that_is() -> anyhow::Result<()> {
    in_a_world(|_, imp| {
        let script = asks(&[PUBLIC_SERVER, PRIVATE_SERVER]);
        let said = imp.run(run(&["--deny", "10.0.0.0/8"], &script))?.good()?;
        assert_eq!(said, format!("{PUBLIC_SERVER}: {HOST}\n{PRIVATE_SERVER}:\n"));
        let allow = format!("{PRIVATE_SERVER}:80");
        let said = imp.run(run(&["--allow", &allow], &script))?.good()?;
        assert_eq!(said, format!("{PUBLIC_SERVER}:\n{PRIVATE_SERVER}: {HOST}\n"));
        let said = imp.run(run(&["--egress", "deny"], &script))?.good()?;
        assert_eq!(said, format!("{PUBLIC_SERVER}:\n{PRIVATE_SERVER}:\n"));
        Ok(())
    })
}

#[test]
fn a_name_opens_its_address_once_it_is_asked_for_and_other_names_lead_nowhere() -> anyhow::Result<()> {
    in_a_world(|world, imp| {
        world.serve_names(PUBLIC_SERVER.parse::<std::net::Ipv4Addr>()?.octets())?;
        let script = asks(&[PUBLIC_SERVER, "other.example", "sub.allowed.example", PUBLIC_SERVER]);
        let said = imp.run(run(&["--allow", "*.allowed.example:80"], &script))?.good()?;
        let expected = format!(
            "{PUBLIC_SERVER}:\nother.example:\nsub.allowed.example: {HOST}\n{PUBLIC_SERVER}: {HOST}\n"
        );
        assert_eq!(said, expected);
        Ok(())
    })
}

#[test]
fn what_needs_a_bridge_says_so_and_the_machine_says_that_it_can() -> anyhow::Result<()> {
    in_a_world(|_, imp| {
        let came = imp.run(["run", "--network", "none", "--egress", "deny", IMAGE, "true"])?;
        assert_eq!(came.code, Some(125));
        assert!(came.stderr.contains("--network bridge"), "{}", came.stderr);
        let checks: serde_json::Value = serde_json::from_str(&imp.run(["doctor", "-o", "json"])?.stdout)?;
        let all = checks.as_array().cloned().unwrap_or_default();
        let bridge = all.iter().find(|check| check.get("name").is_some_and(|name| name == "bridge"));
        let state = bridge.and_then(|check| check.get("state")?.as_str());
        assert_eq!(state, Some("good"), "{checks}");
        world::nft("add table ip filter")?;
        world::nft("add chain ip filter FORWARD { type filter hook forward priority 0 ; policy drop ; }")?;
        let text = imp.run(["doctor"])?.stdout;
        assert!(text.contains("nft insert rule ip filter FORWARD"), "{text}");
        world::nft("delete table ip filter")?;
        Ok(())
    })
}
