//! What the agent writes to the console before there is a channel, and the host looks for.

/// Begins the reason for which the agent restarts a machine that has just booted, so that it boots once more.
pub const AGAIN: &str = "the machine boots again: ";
