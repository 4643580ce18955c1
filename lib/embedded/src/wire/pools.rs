//! Warm pools, as the owner's socket carries them.

use imp_protocol::runtime as wire;

use super::{Error, digest_from_wire};
use crate::report::Pool;

pub(crate) fn pool_to_wire(pool: Pool) -> wire::Pool {
    wire::Pool {
        name: pool.name,
        template: pool.template,
        snapshot: pool.snapshot.to_string(),
        size: pool.size,
        ready: pool.ready,
        failed: pool.failed.unwrap_or_default(),
    }
}

pub(crate) fn pool_from_wire(pool: Option<wire::Pool>) -> Result<Pool, Error> {
    let pool = pool.ok_or(Error::Field("pool"))?;
    Ok(Pool {
        snapshot: digest_from_wire(&pool.snapshot)?,
        name: pool.name,
        template: pool.template,
        size: pool.size,
        ready: pool.ready,
        failed: Some(pool.failed).filter(|failed| !failed.is_empty()),
    })
}
