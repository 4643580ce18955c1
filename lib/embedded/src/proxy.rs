//! Passes calls of `imp.guest.v1` to the agent of the VM that a header names, without looking into them.

use std::convert::Infallible;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use imp_protocol::connection::VM_HEADER;
use imp_runtime::{GuestHold, Runtime};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use crate::reach::{reach, resolve};

/// One service of the guest, by its name.
pub(crate) trait GuestService: Send + Sync + 'static {
    const NAME: &'static str;
}

macro_rules! guest_services {
    ($($service:ident = $name:literal),*) => {$(
        pub(crate) enum $service {}
        impl GuestService for $service {
            const NAME: &'static str = $name;
        }
    )*};
}
guest_services!(
    Machine = "imp.guest.v1.Machine",
    Processes = "imp.guest.v1.Processes",
    Files = "imp.guest.v1.Files",
    Ports = "imp.guest.v1.Ports"
);

/// All calls of one guest service, for every VM.
pub(crate) struct Proxy<S> {
    runtime: Runtime,
    service: PhantomData<S>,
}

impl<S> Proxy<S> {
    pub(crate) fn new(runtime: Runtime) -> Self {
        Self { runtime, service: PhantomData }
    }
}

impl<S> Clone for Proxy<S> {
    fn clone(&self) -> Self {
        Self::new(self.runtime.clone())
    }
}

impl<S: GuestService> NamedService for Proxy<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: GuestService> Service<Request<Body>> for Proxy<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let runtime = self.runtime.clone();
        Box::pin(async move { Ok(pass(&runtime, request).await.unwrap_or_else(|status| status.into_http())) })
    }
}

async fn pass(runtime: &Runtime, mut request: Request<Body>) -> Result<Response<Body>, Status> {
    let header = request.headers_mut().remove(VM_HEADER);
    let vm = header.as_ref().and_then(|vm| vm.to_str().ok());
    let vm = vm.ok_or_else(|| Status::invalid_argument(format!("the header {VM_HEADER} names no VM")))?;
    let id = resolve(runtime, vm)?;
    let hold = reach(runtime, &id).await?;
    let mut connection = hold.connection();
    let broke =
        |error: hyper::Error| Status::unavailable(format!("the connection to the guest broke: {error}"));
    std::future::poll_fn(|context| connection.poll_ready(context)).await.map_err(broke)?;
    let answer = connection.call(request).await.map_err(broke)?;
    Ok(answer.map(|body| Body::new(Held { body, _hold: hold })))
}

/// An answer's body that keeps the guest from going down until it has been passed on.
struct Held {
    body: hyper::body::Incoming,
    _hold: GuestHold,
}

impl http_body::Body for Held {
    type Data = bytes::Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}
