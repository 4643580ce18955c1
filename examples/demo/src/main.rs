//! Shows what Imp does, by the `imp` that a user would call: every command is printed before it runs, every outcome is
//! checked, and at the end nothing may be left.

mod machine;
mod sandboxes;
mod web;

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use imp_testkit::images;

use machine::{Machine, step};

const PYTHON: &str = "imp.test/python";
const SCRATCH: &str = "imp.test/scratch";

fn main() -> anyhow::Result<()> {
    let machine = Machine::new()?;
    make_images(&machine)?;
    arguments_input_and_exit_code(&machine)?;
    an_image_with_one_program(&machine)?;
    a_kernel_of_its_own(&machine)?;
    destruction_stays_inside(&machine)?;
    files_in_and_out(&machine)?;
    a_web_server(&machine)?;
    sandboxes::show(&machine, PYTHON)?;
    timings(&machine)?;
    machine.leave_nothing()?;
    println!("\nAll of it worked, and nothing is left.");
    Ok(())
}

fn make_images(machine: &Machine) -> anyhow::Result<()> {
    step("Two images, made here from Debian packages and from one static binary");
    for layout in [images::python()?, images::scratch()?] {
        machine.imp(&["image", "import", &format!("oci:{}", layout.display())])?;
    }
    machine.imp(&["image", "ls"])?;
    Ok(())
}

fn arguments_input_and_exit_code(machine: &Machine) -> anyhow::Result<()> {
    step("A program with arguments, standard input and an exit code");
    let ended = machine
        .command(&["run", "--rm", "-i", PYTHON, "--", "/srv/app/main.py", "--exit", "7", "one", "two  three"])
        .input(b"typed\n")
        .run()?;
    ensure!(ended.code == Some(7), "the exit code is {:?}, not 7", ended.code);
    for part in ["['one', 'two  three']", "'typed\\n'", "user 1000 in /srv/app"] {
        ensure!(ended.output.contains(part), "{part} is not in the output");
    }
    Ok(())
}

fn an_image_with_one_program(machine: &Machine) -> anyhow::Result<()> {
    step("An image with one static binary: no shell, no libraries");
    let ended =
        machine.command(&["run", "--rm", "-e", "COLOR=blue", SCRATCH, "--", "$HOME", "--exit", "3"]).run()?;
    ensure!(ended.code == Some(3), "the exit code is {:?}, not 3", ended.code);
    ensure!(ended.output.contains("argument $HOME"), "the argument did not arrive verbatim");
    ensure!(ended.output.contains("variable COLOR=blue"), "the variable did not arrive");
    Ok(())
}

fn a_kernel_of_its_own(machine: &Machine) -> anyhow::Result<()> {
    step("A kernel of its own");
    let guest = machine.imp(&["run", "--rm", "--entrypoint", "uname", PYTHON, "--", "-r"])?;
    let host = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    println!("  this machine runs {}", host.trim());
    ensure!(guest.trim() != host.trim(), "the guest has the host's kernel");
    Ok(())
}

fn destruction_stays_inside(machine: &Machine) -> anyhow::Result<()> {
    step("`rm -rf /` in one VM changes neither the image nor another VM");
    machine.imp(&["run", "-d", "--name", "witness", "--entrypoint", "sleep", PYTHON, "--", "infinity"])?;
    let destroy = ["run", "--rm", "-u", "root", "--entrypoint", "sh", PYTHON, "--", "-c"];
    let script = "rm -rf --no-preserve-root / 2>/dev/null; cat /srv/app/main.py || echo it is gone";
    let ended = machine.command(&destroy).argument(script).run()?;
    ensure!(ended.code != Some(0) || !ended.output.contains("argparse"), "the files are still there");
    let witness = machine.imp(&["exec", "witness", "--", "python3", "/srv/app/main.py", "unharmed"])?;
    ensure!(witness.contains("unharmed"), "the other VM was harmed");
    machine.imp(&["run", "--rm", PYTHON, "--", "/srv/app/main.py", "a", "new", "one"])?;
    machine.imp(&["rm", "-f", "witness"])?;
    Ok(())
}

fn files_in_and_out(machine: &Machine) -> anyhow::Result<()> {
    step("A directory goes in, a result comes out");
    let given = machine.folder.path().join("given");
    let result = machine.folder.path().join("result.txt");
    fs::create_dir(&given)?;
    fs::write(given.join("numbers.txt"), "1\n2\n39\n")?;
    let volume = format!("{}:/given:ro", given.display());
    machine.imp(&[
        "run",
        "-d",
        "--name",
        "worker",
        "-v",
        &volume,
        "--entrypoint",
        "sleep",
        PYTHON,
        "--",
        "infinity",
    ])?;
    let sum = "open('/tmp/sum', 'w').write(str(sum(map(int, open('/given/numbers.txt')))))";
    machine.imp(&["exec", "worker", "--", "python3", "-c", sum])?;
    machine.imp(&["cp", "worker:/tmp/sum", &result.display().to_string()])?;
    let sum = fs::read_to_string(&result).context("reading the result")?;
    println!("  the sum is {sum}");
    ensure!(sum == "42", "the sum is {sum}, not 42");
    machine.imp(&["rm", "-f", "worker"])?;
    fs::remove_dir_all(given)?;
    fs::remove_file(result)?;
    Ok(())
}

fn a_web_server(machine: &Machine) -> anyhow::Result<()> {
    step("A port of this machine leads to a web server in a VM");
    let port = web::free_port()?;
    let publish = format!("127.0.0.1:{port}:8080");
    machine.imp(&[
        "run",
        "-d",
        "--name",
        "web",
        "-p",
        &publish,
        PYTHON,
        "--",
        "-m",
        "http.server",
        "8080",
    ])?;
    let page = web::fetch(port, Duration::from_secs(60))?;
    println!("  http://127.0.0.1:{port}/ says: {}", page.trim());
    ensure!(page.contains("served by a guest"), "that is not the guest's page");
    machine.imp(&["stop", "web"])?;
    machine.imp(&["rm", "web"])?;
    Ok(())
}

fn timings(machine: &Machine) -> anyhow::Result<()> {
    step("Where the time goes");
    machine.imp(&["run", "--rm", "--timings", SCRATCH])?;
    Ok(())
}
