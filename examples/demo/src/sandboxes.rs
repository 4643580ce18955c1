//! Interpreters that are ready: a template, a warm pool of it, and forks of one that has begun to work.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::machine::{Machine, step};

/// An interpreter that is asked by one pipe and answers by another, and keeps what it was told in its memory.
const INTERPRETER: &str = "
import os
for pipe in ('/tmp/ask', '/tmp/answer'):
    os.mkfifo(pipe)
names = {}
while True:
    with open('/tmp/ask') as ask:
        code = ask.read()
    try:
        answer = repr(eval(code, names))
    except SyntaxError:
        exec(code, names)
        answer = 'done'
    with open('/tmp/answer', 'w') as out:
        out.write(answer + '\\n')
";
const ASK: &str = "printf %s \"$1\" >/tmp/ask; cat /tmp/answer";
const POOL: u64 = 3;
/// An emulated machine fills a pool slowly.
const FULL: Duration = Duration::from_secs(180);

pub(crate) fn show(machine: &Machine, image: &str) -> anyhow::Result<()> {
    step("A template: Python, running and ready");
    let build = ["template", "build", "python", "--network", "none", "--wait-command", "test -p /tmp/answer"];
    machine
        .command(&build)
        .argument(image)
        .argument("--")
        .argument("-c")
        .argument(INTERPRETER)
        .run()?
        .good()?;
    machine.imp(&["template", "ls"])?;
    step("A warm pool of it, and one of its VMs taken");
    machine.imp(&["pool", "create", "sandboxes", "--template", "python", "--size", &POOL.to_string()])?;
    until_full(machine)?;
    let began = Instant::now();
    let vm = machine.imp(&["run", "-d", "--pool", "sandboxes"])?;
    println!("  the command took {} ms; its VM was", began.elapsed().as_millis());
    let vm = vm.trim();
    println!("  awake {} ms after it was asked for", woken(machine, vm)?);
    step("What is in its memory goes to its forks, and then they go their own ways");
    ask(machine, vm, "x = 40")?;
    machine.imp(&["fork", "-n", "2", "--name", "fork", vm])?;
    for (fork, then) in [("fork-1", "41"), ("fork-2", "42")] {
        ensure!(ask(machine, fork, "x")? == "40", "{fork} has not got what its parent had");
        ask(machine, fork, &format!("x = {then}"))?;
    }
    for (vm, x) in [("fork-1", "41"), ("fork-2", "42"), (vm, "40")] {
        ensure!(ask(machine, vm, "x")? == x, "{vm} does not go its own way");
    }
    step("What they take of this machine's memory: their own pages, and what they share");
    machine.imp(&["top", "--once"])?;
    machine.imp(&["pool", "rm", "sandboxes"])?;
    machine.imp(&["rm", "-f", "fork-1", "fork-2", vm])?;
    machine.imp(&["template", "rm", "python"])?;
    Ok(())
}

fn ask(machine: &Machine, vm: &str, code: &str) -> anyhow::Result<String> {
    Ok(machine.imp(&["exec", vm, "--", "sh", "-c", ASK, "sh", code])?.trim().to_owned())
}

fn until_full(machine: &Machine) -> anyhow::Result<()> {
    let until = Instant::now() + FULL;
    loop {
        let pools = machine.quietly(&["pool", "ls", "-o", "json"])?;
        let pools: Value = serde_json::from_str(&pools).context("reading the list of pools")?;
        if pools.pointer("/0/ready").and_then(Value::as_u64) == Some(POOL) {
            machine.imp(&["pool", "ls"])?;
            return Ok(());
        }
        ensure!(Instant::now() < until, "the pool is not full after {} s: {pools}", FULL.as_secs());
        thread::sleep(Duration::from_millis(100));
    }
}

/// Milliseconds from the claim until the guest had confirmed who it is.
fn woken(machine: &Machine, vm: &str) -> anyhow::Result<u64> {
    let vms: Value =
        serde_json::from_str(&machine.quietly(&["inspect", vm])?).context("reading what a VM is")?;
    let stages = vms.pointer("/0/stages").and_then(Value::as_array).context("no stages")?;
    let woken = stages.iter().rfind(|stage| stage.get("name") == Some(&"woken".into()));
    woken.and_then(|stage| stage.get("milliseconds")?.as_u64()).context("it has not woken")
}
