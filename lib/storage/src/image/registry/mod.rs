//! Registries: the client of the distribution API, version 2.
//!
//! ```text
//! resolve:  mirror or registry ─► manifest or index ─► (platform) ─► manifest        every digest verified
//! download: for each blob: writer's lock ─► bytes, continued when cut ─► verified ─► renamed
//! push:     for each blob: asked for ─► unless it is there: begun, sent whole ─► last of all the manifest
//! ```

pub(crate) mod artifacts;
pub(crate) mod attempts;
mod challenge;
pub mod credentials;
mod download;
pub mod endpoint;
pub mod error;
mod pull;
mod retry;
mod session;
pub mod settings;
pub(crate) mod transport;

pub use error::Error;
pub(crate) use pull::{Found, Pull};
