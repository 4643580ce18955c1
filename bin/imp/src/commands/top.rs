//! `imp top`

use std::collections::HashMap;
use std::time::{Duration, Instant};

use clap::Args;
use imp_embedded::report::Usage;
use serde::Serialize;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output::{self, Listing, Row};
use crate::terminal;
use crate::value::{self, show_bytes};

/// Show what VMs use, again and again on a terminal, once elsewhere
#[derive(Debug, Args)]
#[command(visible_alias = "stats")]
pub(crate) struct Top {
    /// Name, id, or the beginning of an id [default: all that run]
    #[arg(value_name = "VM")]
    vms: Vec<String>,
    /// Once, also on a terminal
    #[arg(long)]
    once: bool,
    /// Time between two samples, in seconds
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true,
          default_value = "1", value_parser = value::duration)]
    interval: Duration,
    #[command(flatten)]
    listing: Listing,
}

/// What a VM uses, between two samples.
#[derive(Debug, Serialize)]
struct Shown {
    id: String,
    name: String,
    /// Processor time of the VMM, in hundredths of one processor.
    cpu_percent: f64,
    /// Of the guest, as far as it answers.
    memory_used_bytes: Option<u64>,
    memory_total_bytes: u64,
    /// What the guest has given back of it, if it has a balloon; not counted as used.
    memory_given_back_bytes: Option<u64>,
    /// Of the VMM on the host.
    host_resident_bytes: u64,
    /// Pages that this VMM alone has.
    host_private_bytes: u64,
    /// Pages that others have, too.
    host_shared_bytes: u64,
    /// Each page by the number of those who have it: over all VMs these add up.
    host_proportional_bytes: u64,
    disk_used_bytes: u64,
    network_received_bytes: Option<u64>,
    network_sent_bytes: Option<u64>,
    processes: Option<u32>,
}

impl Shown {
    fn new(usage: &Usage, cpu_percent: f64) -> Self {
        let guest = usage.guest.as_ref();
        let given = usage.given_bytes.unwrap_or(0);
        Self {
            id: usage.id.clone(),
            name: usage.name.clone(),
            cpu_percent,
            memory_used_bytes: guest.map(|guest| guest.memory_used_bytes.saturating_sub(given)),
            memory_total_bytes: usage.memory_bytes,
            memory_given_back_bytes: usage.given_bytes,
            host_resident_bytes: usage.host_resident_bytes,
            host_private_bytes: usage.host_private_bytes,
            host_shared_bytes: usage.host_shared_bytes,
            host_proportional_bytes: usage.host_proportional_bytes,
            disk_used_bytes: usage.scratch_bytes,
            network_received_bytes: guest.map(|guest| guest.network_received_bytes),
            network_sent_bytes: guest.map(|guest| guest.network_sent_bytes),
            processes: guest.map(|guest| guest.processes),
        }
    }
}

impl Shown {
    /// What the guest may use.
    fn memory_left(&self) -> u64 {
        self.memory_total_bytes.saturating_sub(self.memory_given_back_bytes.unwrap_or(0))
    }
}

impl Row for Shown {
    const HEADINGS: &'static [&'static str] =
        &["ID", "NAME", "CPU", "MEMORY / LIMIT", "HOST OWN + SHARED", "DISK", "NET IN / OUT", "PROCESSES"];

    fn cells(&self) -> Vec<String> {
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), show_bytes);
        vec![
            self.id.chars().take(12).collect(),
            self.name.clone(),
            format!("{:.1} %", self.cpu_percent),
            format!("{} / {}", bytes(self.memory_used_bytes), show_bytes(self.memory_left())),
            format!("{} + {}", show_bytes(self.host_private_bytes), show_bytes(self.host_shared_bytes)),
            show_bytes(self.disk_used_bytes),
            format!("{} / {}", bytes(self.network_received_bytes), bytes(self.network_sent_bytes)),
            self.processes.map_or_else(|| "?".to_owned(), |processes| processes.to_string()),
        ]
    }

    fn id(&self) -> String {
        self.id.clone()
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

impl Top {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let live = !self.once && self.listing.is_table() && terminal::is_terminal(std::io::stdout());
        context.block_on(async {
            let owner = context.owner().await?;
            let mut before = Sample::new(owner.usage(self.vms.clone()).await?);
            loop {
                tokio::time::sleep(self.interval).await;
                let sample = Sample::new(owner.usage(self.vms.clone()).await?);
                let rows = sample.since(&before);
                if live {
                    // To the top left corner, and nothing below what is printed.
                    output::print("\x1b[H\x1b[J")?;
                }
                self.listing.print(&rows)?;
                if !live {
                    return Ok(0);
                }
                before = sample;
            }
        })?
    }
}

struct Sample {
    at: Instant,
    usages: Vec<Usage>,
}

impl Sample {
    fn new(usages: Vec<Usage>) -> Self {
        Self { at: Instant::now(), usages }
    }

    fn since(&self, before: &Self) -> Vec<Shown> {
        let earlier: HashMap<&str, u64> =
            before.usages.iter().map(|usage| (usage.id.as_str(), usage.host_cpu_nanoseconds)).collect();
        let elapsed = self.at.duration_since(before.at);
        let percent = |usage: &Usage| {
            let since = earlier.get(usage.id.as_str()).copied().unwrap_or(usage.host_cpu_nanoseconds);
            cpu_percent(usage.host_cpu_nanoseconds.saturating_sub(since), elapsed)
        };
        self.usages.iter().map(|usage| Shown::new(usage, percent(usage))).collect()
    }
}

fn cpu_percent(nanoseconds: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { nanoseconds as f64 / elapsed.as_nanos() as f64 * 100.0 }
}

#[cfg(test)]
mod tests {
    use imp_embedded::report::GuestUsage;

    use super::*;

    #[test]
    fn processor_time_is_what_was_used_since_the_sample_before() {
        let usage = |cpu| Usage { id: "a".into(), host_cpu_nanoseconds: cpu, ..Usage::default() };
        let at = Instant::now();
        let before = Sample { at, usages: vec![usage(1_000_000_000)] };
        let after = Sample { at: at + Duration::from_secs(2), usages: vec![usage(4_000_000_000)] };
        assert_eq!(after.since(&before).first().unwrap().cpu_percent, 150.0);
    }

    #[test]
    fn a_guest_that_does_not_answer_is_shown_without_its_part() {
        let usage = Usage { id: "a".into(), memory_bytes: 1 << 20, ..Usage::default() };
        assert_eq!(Shown::new(&usage, 0.0).cells().get(3).unwrap(), "? / 1.0 MiB");
    }

    #[test]
    fn memory_that_a_guest_has_given_back_is_neither_used_nor_its_limit() {
        let guest = GuestUsage { memory_used_bytes: 100 << 20, ..GuestUsage::default() };
        let usage = Usage {
            guest: Some(guest),
            memory_bytes: 256 << 20,
            given_bytes: Some(64 << 20),
            ..Usage::default()
        };
        assert_eq!(Shown::new(&usage, 0.0).cells().get(3).unwrap(), "36 MiB / 192 MiB");
    }

    #[test]
    fn memory_on_the_host_is_told_apart_into_own_and_shared() {
        let (own, shared) = (3 << 20, 1 << 20);
        let usage = Usage { host_private_bytes: own, host_shared_bytes: shared, ..Usage::default() };
        assert_eq!(Shown::new(&usage, 0.0).cells().get(4).unwrap(), "3.0 MiB + 1.0 MiB");
    }
}
