//! What a husk and its client say to each other: lines of JSON over a stream.
//!
//! ```text
//! client: {"op":"prepare"}⏎ {request}⏎          husk: {answer}⏎      again and again
//! client: {an activation, without an op before it}⏎   husk: {answer}⏎      and the connection is closed
//! ```

mod answer;
mod line;
mod raw;
mod request;
mod variables;

pub(crate) use answer::{Answer, Code, Facts, Stages};
pub(crate) use line::{LONGEST, Lines, TooLong};
pub(crate) use request::{
    Activate, First, ForkSnapshot, Id, Invalid, Op, Prepare, Reach, RemoveForkSnapshot, Request, SnapshotRef,
    Trust, first, request,
};
pub(crate) use variables::Variables;
