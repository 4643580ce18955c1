//! What a husk takes beside its machine's VMM.

use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use imp_testkit::husk::Husk;
use imp_testkit::imp::{Driver, Imp};

use crate::programs::memory;
use crate::report::{Limit, Line, Quantity};

/// After this long without a client a husk has given back what it does not need.
const REST: Duration = Duration::from_secs(2);
const MOST: u64 = 8 << 20;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    let imp = Imp::with_busybox(Driver::Qemu)?;
    let build = ["template", "build", "--network", "none", "-m", "128m", "ready", "imp.test/busybox"];
    let digest = imp.run(build.iter().chain(&["--", "sleep", "1000000"]))?.good()?;
    let digest = digest.trim().trim_start_matches("sha256:");
    let directory = imp.data().join("images/snapshots").join(digest).display().to_string();
    let husk = Husk::start(&imp, "husk", &["--snapshot-dir", &directory, "--expected-digest", digest])?;
    let dormant = resident(&husk)?;
    husk.granted("activate", &[])?;
    let active = resident(&husk)?;
    husk.end()?;
    imp.end()?;
    let line =
        |name, ours| Line { name, ours: Quantity::Bytes(ours), limit: Limit::AtMost(Quantity::Bytes(MOST)) };
    Ok(vec![
        line("husk at rest, resident beside its dormant VMM", dormant),
        line("husk at rest, resident beside its active VMM", active),
    ])
}

fn resident(husk: &Husk) -> anyhow::Result<u64> {
    thread::sleep(REST);
    memory(husk.pid(), "VmRSS:").context("the husk has ended")
}
