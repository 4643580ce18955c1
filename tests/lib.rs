//! Promises to a user, one file each.
