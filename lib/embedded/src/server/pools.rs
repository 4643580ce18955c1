//! The service of `pools.proto`.

use imp_protocol::runtime as wire;
use imp_protocol::runtime::pools_server::Pools as Service;
use tonic::{Request, Response, Status};

use super::{Server, encode};
use crate::name::PoolName;
use crate::pools::{Error, Record};
use crate::refusal::{chain, invalid, refusal};
use crate::wire as convert;

/// The part of an owner that keeps pools.
#[derive(Clone)]
pub(crate) struct Pools(pub(crate) Server);

#[tonic::async_trait]
impl Service for Pools {
    async fn create(
        &self,
        request: Request<wire::CreatePoolRequest>,
    ) -> Result<Response<wire::CreatePoolResponse>, Status> {
        let wire::CreatePoolRequest { name, template, size } = request.into_inner();
        let name: PoolName = name.parse().map_err(|error| invalid(&error))?;
        let snapshot = self.0.template(&template).await?;
        let (pools, record) = (self.0.pools.clone(), Record { name, template, snapshot, size });
        let made = self.0.under_way.whole(async move { pools.create(record).await });
        let pool = made.await?.map_err(|error| status(&error))?;
        Ok(Response::new(wire::CreatePoolResponse { pool: Some(convert::pool_to_wire(pool)) }))
    }

    async fn list(
        &self,
        _: Request<wire::ListPoolsRequest>,
    ) -> Result<Response<wire::ListPoolsResponse>, Status> {
        let pools = self.0.pools.list().into_iter().map(convert::pool_to_wire);
        Ok(Response::new(wire::ListPoolsResponse { pools: pools.collect() }))
    }

    async fn remove(
        &self,
        request: Request<wire::RemovePoolRequest>,
    ) -> Result<Response<wire::RemovePoolResponse>, Status> {
        let (pools, name) = (self.0.pools.clone(), request.into_inner().name);
        let removed = self.0.under_way.whole(async move { pools.remove(&name).await });
        removed.await?.map_err(|error| status(&error))?;
        Ok(Response::new(wire::RemovePoolResponse {}))
    }

    async fn claim(
        &self,
        request: Request<wire::ClaimRequest>,
    ) -> Result<Response<wire::ClaimResponse>, Status> {
        let wire::ClaimRequest { pool, identity, claim } = request.into_inner();
        let claim = convert::claim_from_wire(claim.unwrap_or_default()).map_err(|error| invalid(&error))?;
        let identity = convert::identity_from_wire(identity).map_err(|error| invalid(&error))?;
        let pools = self.0.pools.clone();
        // What is taken is given to somebody, or ended.
        let claimed = self.0.under_way.whole(async move { pools.claim(&pool, claim, identity).await });
        let claimed = claimed.await?.map_err(|error| status(&error))?;
        Ok(Response::new(wire::ClaimResponse {
            vm: Some(encode(&claimed.vm)?),
            was_ready: claimed.was_ready,
        }))
    }
}

fn status(error: &Error) -> Status {
    let message = chain(error);
    match error {
        Error::NoSuchPool(_) => Status::not_found(message),
        Error::Taken(_) => Status::already_exists(message),
        Error::Changing(_) => Status::failed_precondition(message),
        Error::Size(_) => Status::invalid_argument(message),
        Error::Runtime(error) => refusal(error),
        Error::Record(_) | Error::Ended => Status::internal(message),
    }
}
