//! A pool keeps VMs prepared, gives each to one who asks, and is filled again, whoever owns it.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::net::TcpStream;
use std::process::Command;

use anyhow::Context as _;
use imp_testkit::imp::{Imp, finish, wait_until};

use super::promises::driver::on_driver;
use super::templates::{build, json};
use crate::DRIVER;

fn is_full(imp: &Imp, size: u64) -> anyhow::Result<()> {
    wait_until("the pool is full", || {
        Ok(json(imp, &["pool", "ls", "-o", "json"])?.pointer("/0/ready") == Some(&size.into()))
    })
}

/// Ids of the VMs that wait.
fn waiting(imp: &Imp) -> anyhow::Result<BTreeSet<String>> {
    let vms = json(imp, &["ps", "--prepared", "-o", "json"])?;
    let vms = vms.as_array().context("no list")?.iter();
    let waiting = vms.filter(|vm| vm.get("state") == Some(&"prepared".into()));
    Ok(waiting.filter_map(|vm| vm.get("id")?.as_str().map(str::to_owned)).collect())
}

#[test]
fn a_claim_takes_exactly_one_vm_and_the_pool_is_filled_again() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        build(&imp, "ready")?;
        imp.run(["pool", "create", "warm", "--template", "ready", "--size", "2"])?.good()?;
        is_full(&imp, 2)?;
        let before = waiting(&imp)?;
        // What is done to all that are listed is not done to these.
        for line in [["ps", "-q"], ["ps", "-aq"]] {
            assert_eq!(imp.run(line)?.good()?, "", "{line:?}");
        }
        let claims: Vec<_> =
            (0..2).map(|_| imp.command(["run", "-d", "--pool", "warm"]).spawn()).collect::<Result<_, _>>()?;
        let claims = claims.into_iter().map(|claim| Ok(finish(claim)?.good()?.trim().to_owned()));
        let claimed = claims.collect::<anyhow::Result<BTreeSet<String>>>()?;
        assert_eq!(claimed, before, "each got one, and both were prepared");
        // Those that the pool is still making are listed like any other.
        is_full(&imp, 2)?;
        assert_eq!(
            imp.run(["ps", "-q"])?.good()?.lines().collect::<BTreeSet<_>>(),
            claimed.iter().map(String::as_str).collect()
        );
        for vm in &claimed {
            assert_eq!(imp.run(["exec", vm, "cat", "/said"])?.good()?, "ready\n");
        }
        // Those that wait are adopted, not made again.
        let before = waiting(&imp)?;
        imp.kill_owner()?;
        is_full(&imp, 2)?;
        assert_eq!(waiting(&imp)?, before);
        // One that dies leaves nothing, and the pool says why there is another one.
        let dead = before.first().context("none waits")?;
        let process =
            imp.inspect(dead)?.get("vmm_pid").and_then(serde_json::Value::as_u64).context("no VMM")?;
        Command::new("kill").args(["-9", &process.to_string()]).status()?;
        wait_until("the pool says why", || {
            let failed = json(&imp, &["pool", "ls", "-o", "json"])?.pointer("/0/failed").cloned();
            Ok(failed.is_some_and(|why| why.as_str().is_some_and(|why| why.contains("is gone"))))
        })?;
        is_full(&imp, 2)?;
        assert!(!waiting(&imp)?.contains(dead));
        for line in [&["ps", "-aq"][..], &["ps", "-q", "--prepared"]] {
            assert!(!imp.run(line)?.good()?.contains(dead.as_str()), "it stays");
        }
        let came = imp.run(["template", "rm", "ready"])?;
        assert!(came.code == Some(1) && came.stderr.contains("`imp pool rm warm`"), "{}", came.stderr);
        imp.run(["pool", "rm", "warm"])?.good()?;
        assert!(waiting(&imp)?.is_empty());
        for vm in &claimed {
            imp.run(["exec", vm, "true"])?.good()?;
        }
        imp.end()
    })
}

#[test]
fn whoever_takes_a_vm_of_a_pool_gives_it_a_name_ports_and_labels_and_is_told_what_it_cannot_be_given()
-> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        build(&imp, "ready")?;
        imp.run(["pool", "create", "warm", "--template", "ready", "--size", "1"])?.good()?;
        is_full(&imp, 1)?;
        let waits = waiting(&imp)?;
        let line =
            ["run", "-d", "--rm", "--pool", "warm", "--name", "mine", "-l", "a=b", "-p", "127.0.0.1:0:80"];
        let taken = imp.run(line)?.good()?;
        assert_eq!(waits, BTreeSet::from([taken.trim().to_owned()]));
        let inspected = imp.inspect("mine")?;
        let labels = inspected.pointer("/labels").context("no labels")?;
        assert!(labels.get("a") == Some(&"b".into()) && labels.get("imp.pool").is_some(), "{labels}");
        let port = inspected.pointer("/ports/0").and_then(|port| port.as_str()).context("no port")?;
        let (port, _) = port.split_once("->").context("it leads nowhere")?;
        let serve = imp.command(["exec", "mine", "sh", "-c", "echo hello | nc -l -p 80"]).spawn()?;
        let mut said = String::new();
        wait_until("it is reached", || {
            said.clear();
            let _ = TcpStream::connect(port).map(|mut stream| stream.read_to_string(&mut said));
            Ok(!said.is_empty())
        })?;
        assert_eq!(said, "hello\n");
        finish(serve)?.good()?;
        // Also under another owner.
        imp.kill_owner()?;
        assert_eq!(imp.run(["exec", "mine", "cat", "/said"])?.good()?, "ready\n");
        let serve = imp.command(["exec", "mine", "sh", "-c", "echo again | nc -l -p 80"]).spawn()?;
        wait_until("it is reached again", || {
            said.clear();
            let _ = TcpStream::connect(port).map(|mut stream| stream.read_to_string(&mut said));
            Ok(said == "again\n")
        })?;
        finish(serve)?.good()?;

        is_full(&imp, 1)?;
        let waits = waiting(&imp)?;
        let port = format!("{port}:80");
        let refusals: [(&[&str], &str); 5] = [
            (&["--name", "mine"], "there is a VM mine already"),
            (&["-p", &port], "cannot listen on"),
            (&["--egress", "deny"], "was made when it was prepared"),
            (&["-m", "1g"], "build another template"),
            (&["-v", "./a:/b"], "imp cp"),
        ];
        for (flags, why) in refusals {
            let came = imp.run(["run", "-d", "--pool", "warm"].iter().chain(flags))?;
            let said = came.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(came.code == Some(125) && said.contains(why), "{flags:?}: {}", came.stderr);
            assert_eq!(waiting(&imp)?, waits, "{flags:?}");
        }
        imp.run(["kill", "mine"])?.good()?;
        wait_until("it removed itself", || {
            Ok(!imp.run(["ps", "-a", "-o", "name"])?.good()?.contains("mine"))
        })?;
        // The name is free, and without one it has the pool's.
        let line = ["run", "-d", "--pool", "warm", "--name", "mine"];
        imp.run(line)?.good()?;
        imp.run(["run", "-d", "--pool", "warm"])?.good()?;
        assert_eq!(imp.run(["ps", "-o", "name"])?.good()?.lines().filter(|name| *name == "mine").count(), 1);
        imp.run(["pool", "rm", "warm"])?.good()?;
        imp.end()
    })
}
