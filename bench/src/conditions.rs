//! Under what conditions the numbers were taken: without them they say nothing.

use std::fs;
use std::process::Command;

use imp_testkit::imp::Driver;
use imp_testkit::{machine, node};

pub(crate) fn print(driver: Driver) -> anyhow::Result<()> {
    let cpu_info = fs::read_to_string("/proc/cpuinfo")?;
    let cpu = cpu_info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let cores = cpu_info.lines().filter(|line| line.starts_with("processor")).count();
    let load = fs::read_to_string("/proc/loadavg")?;
    let load: Vec<&str> = load.split(' ').take(3).collect();
    let guest = fs::read_to_string(machine::kernels()?.join("default/release"))?;
    println!("cpu      {} x {}", cores, cpu.trim_start_matches([' ', '\t', ':']));
    println!("load     {}", load.join(" "));
    println!("host     Linux {}", fs::read_to_string("/proc/sys/kernel/osrelease")?.trim());
    println!("guest    Linux {}", guest.trim());
    println!("driver   {}", first_line(&program(driver)?, "--version")?);
    println!("kvm      {}", acceleration()?);
    println!("imp      {}\n", first_line(&machine::imp()?.display().to_string(), "--version")?);
    Ok(())
}

fn program(driver: Driver) -> anyhow::Result<String> {
    Ok(match driver {
        Driver::Qemu => "qemu-system-x86_64".to_owned(),
        Driver::Firecracker => node::artefacts::firecracker()?.display().to_string(),
    })
}

/// What `imp doctor` found out by trying.
fn acceleration() -> anyhow::Result<String> {
    let output = Command::new(machine::imp()?).arg("doctor").output()?;
    let checks = String::from_utf8_lossy(&output.stdout).into_owned();
    let kvm = checks.lines().find_map(|line| line.split_once(" kvm "));
    Ok(kvm.map(|(_, found)| found.trim().to_owned()).unwrap_or_default())
}

fn first_line(program: &str, argument: &str) -> anyhow::Result<String> {
    let output = Command::new(program).arg(argument).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}
