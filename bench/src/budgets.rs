//! The budgets, by group.

mod copy;
mod exec;
mod image;
mod memory;
mod programs;
mod run;

use crate::report::Line;

type Group = (&'static str, fn() -> anyhow::Result<Vec<Line>>);

pub(crate) const ALL: &[Group] = &[
    ("programs", programs::measure),
    ("image", image::measure),
    ("run", run::measure),
    ("exec", exec::measure),
    ("copy", copy::measure),
    ("memory", memory::measure),
];
