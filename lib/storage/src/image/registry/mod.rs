//! Registries: the client of the distribution API, version 2.
//!
//! ```text
//! resolve:  mirror or registry ─► manifest or index ─► (platform) ─► manifest        every digest verified
//! download: for each blob: writer's lock ─► bytes, continued when cut ─► verified ─► renamed
//! ```

mod attempts;
mod challenge;
pub mod credentials;
mod download;
pub mod endpoint;
pub mod error;
mod pull;
mod retry;
mod session;
pub mod settings;
mod transport;

pub use error::Error;
pub(crate) use pull::{Found, Pull};
