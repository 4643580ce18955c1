//! The far side of a node VM of the tests: what the static program `imp-node` is told and how it answers.
//!
//! The program is the node's PID 1, and on the host the guard that starts the node's processes and outlives the test by
//! just the time it takes to end them. `imp_testkit::node` is the near side.

pub mod guard;
pub mod wire;
