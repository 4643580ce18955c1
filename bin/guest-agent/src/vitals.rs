//! One sample of processor, memory, disk, network and load, from /proc.

use std::fs;

use imp_protocol::guest::VitalsResponse;

const SECTOR: u64 = 512;

pub(crate) fn sample() -> VitalsResponse {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let nanoseconds = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
    let cpu = Cpu::parse(&read("/proc/stat"));
    let memory = read("/proc/meminfo");
    let root = rustix::fs::statvfs("/").ok();
    let disk = |blocks: fn(&rustix::fs::StatVfs) -> u64| {
        root.as_ref().map_or(0, |root| blocks(root) * root.f_frsize)
    };
    let (disk_read_bytes, disk_written_bytes) = disks(&read("/proc/diskstats"));
    let (network_received_bytes, network_sent_bytes) = network(&read("/proc/net/dev"));
    VitalsResponse {
        cpu_busy_nanoseconds: cpu.busy * nanoseconds,
        cpu_idle_nanoseconds: cpu.idle * nanoseconds,
        cpu_iowait_nanoseconds: cpu.iowait * nanoseconds,
        cpus: cpu.count,
        memory_total_bytes: kibibytes(&memory, "MemTotal:") * 1024,
        memory_available_bytes: kibibytes(&memory, "MemAvailable:") * 1024,
        disk_total_bytes: disk(|root| root.f_blocks),
        disk_available_bytes: disk(|root| root.f_bavail),
        disk_read_bytes,
        disk_written_bytes,
        network_received_bytes,
        network_sent_bytes,
        processes: crate::processes::count(),
        load1_centi: load(&read("/proc/loadavg")),
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Cpu {
    busy: u64,
    idle: u64,
    iowait: u64,
    count: u32,
}

impl Cpu {
    /// user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
    fn parse(stat: &str) -> Self {
        let mut cpu = Self::default();
        for line in stat.lines().filter(|line| line.starts_with("cpu")) {
            if !line.starts_with("cpu ") {
                cpu.count += 1;
                continue;
            }
            for (place, ticks) in line.split_ascii_whitespace().skip(1).take(8).enumerate() {
                let ticks: u64 = ticks.parse().unwrap_or(0);
                match place {
                    3 => cpu.idle += ticks,
                    4 => cpu.iowait += ticks,
                    _ => cpu.busy += ticks,
                }
            }
        }
        cpu
    }
}

fn kibibytes(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Read and written bytes of the machine's virtio disks; partitions and layered devices would count twice.
fn disks(diskstats: &str) -> (u64, u64) {
    let whole = |name: &str| {
        name.strip_prefix("vd").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_lowercase()))
    };
    let mut total = (0, 0);
    for line in diskstats.lines() {
        let mut fields = line.split_ascii_whitespace().skip(2);
        if !fields.next().is_some_and(whole) {
            continue;
        }
        let numbers: Vec<u64> = fields.take(7).filter_map(|field| field.parse().ok()).collect();
        if let [_, _, read, _, _, _, written] = numbers[..] {
            total = (total.0 + read * SECTOR, total.1 + written * SECTOR);
        }
    }
    total
}

/// Received and sent bytes of all interfaces but loopback.
fn network(dev: &str) -> (u64, u64) {
    let mut total = (0, 0);
    for (name, counters) in dev.lines().filter_map(|line| line.split_once(':')) {
        if name.trim() == "lo" {
            continue;
        }
        let mut counters =
            counters.split_ascii_whitespace().map(|counter| counter.parse::<u64>().unwrap_or(0));
        total.0 += counters.next().unwrap_or(0);
        total.1 += counters.nth(7).unwrap_or(0);
    }
    total
}

fn load(loadavg: &str) -> u32 {
    let first = loadavg.split_ascii_whitespace().next().unwrap_or_default();
    let (whole, part) = first.split_once('.').unwrap_or((first, "0"));
    whole.parse::<u32>().unwrap_or(0).saturating_mul(100).saturating_add(part.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_files_are_read() {
        let stat =
            "cpu  10 1 20 300 4 5 6 7 9 9\ncpu0 5 0 10 150 2 0 0 0 0 0\ncpu1 1 1 1 1 1 1 1 1 1 1\nintr 5\n";
        assert_eq!(Cpu::parse(stat), Cpu { busy: 49, idle: 300, iowait: 4, count: 2 });
        assert_eq!(kibibytes("MemTotal:   1024 kB\nMemAvailable: 7 kB\n", "MemAvailable:"), 7);
        let stats = " 254 0 vda 1 0 10 0 2 0 20 0\n 254 1 vda1 1 0 10 0 2 0 20 0\n 254 16 vdb 1 0 1 0 2 0 2 0\n 7 0 loop0 1 0 9 0 2 0 9 0\n";
        assert_eq!(disks(stats), (11 * 512, 22 * 512));
        let dev = "Inter-|\n face |bytes\n    lo: 9 1 0 0 0 0 0 0 9 1\n  eth0:100 1 0 0 0 0 0 0 200 1 0\n";
        assert_eq!(network(dev), (100, 200));
        assert_eq!(load("1.25 0.5 0.1 1/80 7"), 125);
    }

    #[test]
    fn files_that_are_not_there_are_zeros() {
        assert_eq!(Cpu::parse(""), Cpu::default());
        assert_eq!((kibibytes("", "MemTotal:"), disks(""), network(""), load("")), (0, (0, 0), (0, 0), 0));
    }

    #[test]
    fn a_sample_of_this_machine_has_memory_and_processors() {
        let sample = sample();
        assert!(sample.memory_total_bytes > sample.memory_available_bytes);
        assert!(sample.cpus > 0 && sample.processes > 0 && sample.disk_total_bytes > 0);
    }
}
