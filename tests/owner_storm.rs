//! An owner that dies again and again under a stream of commands: each of them works or says what happened, and the VM lives.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use imp_testkit::imp::{Came, Imp, wait_until};

use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";
/// Owners that are killed.
const ROUNDS: usize = 40;
/// Words of libraries and of the kernel that tell a user nothing.
const NOT_OURS: [&str; 12] = [
    "h2 ",
    "http2",
    "hyper",
    "tonic",
    "transport",
    "grpc",
    "status:",
    "os error",
    "broken pipe",
    "reset by peer",
    "cancelled",
    "stream closed",
];

/// Succeeded, or failed with a sentence of ours and an exit status that says so.
fn is_plain(words: &[&str], came: &Came) -> anyhow::Result<()> {
    let said = came.stderr.to_lowercase();
    let word = NOT_OURS.iter().find(|word| said.contains(**word));
    ensure!(word.is_none(), "{words:?} said {word:?}: {}", came.stderr);
    match came.code {
        Some(0) => Ok(()),
        Some(1 | 125) => {
            // Behind what its program said.
            let complaints = came.stderr.lines().filter(|line| line.starts_with("error: ")).count();
            ensure!(complaints == 1, "{words:?} ended with {:?} and said {said:?}", came.code);
            Ok(())
        }
        code => anyhow::bail!("{words:?} ended with {code:?}: {said}"),
    }
}

#[test]
fn commands_work_or_say_one_plain_sentence_while_their_owner_is_killed_again_and_again() -> anyhow::Result<()>
{
    let imp = Imp::with_busybox(DRIVER)?;
    let line =
        ["run", "-d", "--name", "vm", "--network", "none", IMAGE, "sh", "-c", "echo $$; exec sleep 100000"];
    imp.run(line)?.good()?;
    let vmm = imp.inspect("vm")?.get("vmm_pid").cloned().context("no VMM")?;
    let commands: [&[&str]; 8] = [
        &["ps"],
        &["exec", "vm", "true"],
        &["inspect", "vm"],
        &["logs", "vm"],
        // Refused: it runs.
        &["rm", "vm"],
        &["exec", "vm", "sh", "-c", "echo one; echo two >&2"],
        &["kill", "-s", "CONT", "vm"],
        &["top", "--interval", "0.1", "vm"],
    ];
    let (done, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let stream = |first: usize| -> anyhow::Result<usize> {
        let mut failed = 0;
        for words in commands.iter().cycle().skip(first) {
            if over.load(Ordering::Relaxed) {
                break;
            }
            let came = imp.run(*words)?;
            is_plain(words, &came)?;
            failed += usize::from(came.code != Some(0) && words.first() != Some(&"rm"));
            done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(failed)
    };
    let storm = || -> anyhow::Result<()> {
        let mut killed = None;
        for round in 0..ROUNDS {
            // From at once to a good while after the owner has come.
            let before = done.load(Ordering::Relaxed);
            wait_until("another owner has come and has had work", || {
                Ok(over.load(Ordering::Relaxed) || done.load(Ordering::Relaxed) >= before + round % 5)
            })?;
            wait_until("another owner has come", || {
                let owner = imp.owner_pid()?.filter(|pid| Some(*pid) != killed);
                let Some(owner) = owner else { return Ok(over.load(Ordering::Relaxed)) };
                let pid =
                    i32::try_from(owner).ok().and_then(rustix::process::Pid::from_raw).context("no pid")?;
                // One that has ended by itself meanwhile is as good.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                killed = Some(owner);
                Ok(true)
            })?;
        }
        Ok(())
    };
    let until_it_fails = |first: usize| {
        let failed = stream(first);
        // Nobody waits for a stream that has failed.
        if failed.is_err() {
            over.store(true, Ordering::Relaxed);
        }
        failed
    };
    let (storm, streams) = thread::scope(|scope| {
        let streams = [0, 3].map(|first| {
            let until_it_fails = &until_it_fails;
            scope.spawn(move || until_it_fails(first))
        });
        let storm = storm();
        over.store(true, Ordering::Relaxed);
        (storm, streams.map(thread::ScopedJoinHandle::join))
    });
    for stream in streams {
        let failed = stream.map_err(|_| anyhow::anyhow!("a stream of commands panicked"))??;
        println!("{failed} commands failed");
    }
    storm?;
    println!("{} commands under {ROUNDS} owners", done.load(Ordering::Relaxed));
    // It is the machine that it was.
    assert_eq!(imp.inspect("vm")?.get("vmm_pid"), Some(&vmm));
    let main = imp.run(["logs", "vm"])?.good()?;
    assert_eq!(imp.run(["exec", "vm", "cat", &format!("/proc/{}/comm", main.trim())])?.good()?, "sleep\n");
    imp.end()
}
