//! The budgets, by group.

mod copy;
mod exec;
mod husk;
mod image;
mod lab;
mod memory;
mod programs;
mod run;
mod snapshots;

use crate::report::Line;

type Group = (&'static str, fn() -> anyhow::Result<Vec<Line>>);

pub(crate) const ALL: &[Group] = &[
    ("programs", programs::measure),
    ("image", image::measure),
    ("run", run::measure),
    ("exec", exec::measure),
    ("copy", copy::measure),
    ("memory", memory::measure),
    ("husk", husk::measure),
    ("activation", snapshots::activation::measure),
    ("fork", snapshots::fork::measure),
    ("density", snapshots::density::measure),
];

/// Of VMs in Firecracker.
pub(crate) const LAB: &[Group] = &[
    ("boot", lab::boot::measure),
    ("exec", exec::measure_in_firecracker),
    ("copy", lab::copy::measure),
    ("network", lab::network::measure),
    ("activation", snapshots::activation::measure_in_firecracker),
    ("fork", snapshots::fork::measure_in_firecracker),
    ("density", snapshots::density::measure_in_firecracker),
];
