//! The service for files in the guest: what is there, and content in and out.
//!
//! Paths are absolute and are resolved by the kernel in the guest's root, which is also the agent's. Content is streamed;
//! each step that blocks takes a thread of the bounded pool only for as long as the disk takes, not the host.

mod attributes;
mod content;
mod direct;
mod error;
mod memory;
mod pieces;
mod remove;
mod rename;
mod stat;
mod transfer;

use std::path::PathBuf;

use imp_protocol::guest::files_server::Files;
use imp_protocol::guest::write_archive_input::Input as ArchiveInput;
use imp_protocol::guest::write_file_input::Input as FileInput;
use imp_protocol::guest::{
    FileChunk, ListFilesRequest, ListFilesResponse, MakeDirectoryRequest, MakeDirectoryResponse, MoveRequest,
    MoveResponse, ReadArchiveRequest, ReadFileRequest, RemoveRequest, RemoveResponse, SetAttributesRequest,
    SetAttributesResponse, StatRequest, StatResponse, WatchEvent, WatchRequest, WriteArchiveInput,
    WriteArchiveResponse, WriteFileInput, WriteFileResponse,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

pub(crate) use self::attributes::{Attributes, NewAttributes, modified};
pub(crate) use self::content::{Content, Piece, Zeros};
pub(crate) use self::error::{Error, path_of};
pub(crate) use self::pieces::{Pieces, Spare, chunks};
pub(crate) use self::remove::remove_tree;
use crate::accounts::Accounts;
use crate::agent::Guest;
use crate::{archive, watch};

/// Bytes of content in one message: large enough that its cost is small, small enough that streams take turns. With what is
/// around it, it makes one frame of HTTP/2, which the port's driver takes in eight parts of at most 32 KiB.
pub(crate) const CHUNK: usize = 252 << 10;
/// Chunks of content that wait for a host that does not read.
pub(crate) const WAITING_CHUNKS: usize = 2;

pub(crate) type Stream<T> = ReceiverStream<Result<T, Status>>;

#[tonic::async_trait]
impl Files for Guest {
    type ListStream = Stream<ListFilesResponse>;
    type ReadStream = Stream<FileChunk>;
    type ReadArchiveStream = Stream<FileChunk>;
    type WatchStream = Stream<WatchEvent>;

    async fn stat(&self, request: Request<StatRequest>) -> Result<Response<StatResponse>, Status> {
        let request = request.into_inner();
        let path = path_of(&request.path)?;
        let links = if request.follow_links { stat::Links::Follow } else { stat::Links::Keep };
        let stat = work(move || {
            let mut stat = stat::of(&path, links)?;
            stat::name_owners(&Accounts::read(), std::slice::from_mut(&mut stat));
            Ok(stat)
        });
        Ok(Response::new(StatResponse { stat: Some(stat.await?) }))
    }

    async fn list(&self, request: Request<ListFilesRequest>) -> Result<Response<Self::ListStream>, Status> {
        let path = path_of(&request.into_inner().path)?;
        let mut listing = work(move || stat::Listing::open(path)).await?;
        let (batches, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let (rest, batch) = match crate::blocking(move || {
                    let batch = listing.next_batch();
                    (listing, batch)
                })
                .await
                {
                    Ok(step) => step,
                    Err(status) => return drop(batches.send(Err(status)).await),
                };
                listing = rest;
                let message = match batch {
                    Ok(entries) if entries.is_empty() => return,
                    Ok(entries) => Ok(ListFilesResponse { entries }),
                    Err(error) => Err(error.into()),
                };
                if batches.send(message).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn make_directory(
        &self,
        request: Request<MakeDirectoryRequest>,
    ) -> Result<Response<MakeDirectoryResponse>, Status> {
        let request = request.into_inner();
        let path = path_of(&request.path)?;
        let attributes = Attributes::from(request.attributes);
        let parents =
            if request.parents { attributes::Parents::Make } else { attributes::Parents::MustExist };
        work(move || attributes::make_directory(&path, parents, &attributes)).await?;
        Ok(Response::new(MakeDirectoryResponse {}))
    }

    async fn r#move(&self, request: Request<MoveRequest>) -> Result<Response<MoveResponse>, Status> {
        let request = request.into_inner();
        let (from, to) = (path_of(&request.from)?, path_of(&request.to)?);
        let target = if request.overwrite { rename::Target::Overwrite } else { rename::Target::Keep };
        work(move || rename::rename(&from, &to, target)).await?;
        Ok(Response::new(MoveResponse {}))
    }

    async fn remove(&self, request: Request<RemoveRequest>) -> Result<Response<RemoveResponse>, Status> {
        let request = request.into_inner();
        let path = path_of(&request.path)?;
        let result =
            work(move || if request.recursive { remove_tree(&path) } else { remove::remove_one(&path) })
                .await;
        match result {
            Err(status) if request.missing_is_fine && status.code() == tonic::Code::NotFound => {}
            result => result?,
        }
        Ok(Response::new(RemoveResponse {}))
    }

    async fn set_attributes(
        &self,
        request: Request<SetAttributesRequest>,
    ) -> Result<Response<SetAttributesResponse>, Status> {
        let request = request.into_inner();
        let path = path_of(&request.path)?;
        let attributes = Attributes::from(request.attributes);
        let links = if request.follow_links { stat::Links::Follow } else { stat::Links::Keep };
        work(move || attributes::set(&path, &attributes, links)).await?;
        Ok(Response::new(SetAttributesResponse {}))
    }

    async fn read(&self, request: Request<ReadFileRequest>) -> Result<Response<Self::ReadStream>, Status> {
        let request = request.into_inner();
        let path = path_of(&request.path)?;
        let source = work(move || transfer::Source::open(path, request.offset, request.length)).await?;
        let (chunks, stream) = mpsc::channel(WAITING_CHUNKS);
        tokio::spawn(transfer::send(source, chunks));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn write(
        &self,
        request: Request<Streaming<WriteFileInput>>,
    ) -> Result<Response<WriteFileResponse>, Status> {
        let mut inputs = request.into_inner();
        let Some(FileInput::Open(open)) = inputs.message().await?.and_then(|first| first.input) else {
            return Err(Status::invalid_argument("the first message must be `open`"));
        };
        let path: PathBuf = path_of(&open.path)?;
        let sink = work(move || transfer::Sink::open(path, &open)).await?;
        let size = transfer::receive(sink, inputs).await?;
        Ok(Response::new(WriteFileResponse { size }))
    }

    async fn read_archive(
        &self,
        request: Request<ReadArchiveRequest>,
    ) -> Result<Response<Self::ReadArchiveStream>, Status> {
        archive::serve_read(&self.0, request.into_inner()).await
    }

    async fn write_archive(
        &self,
        request: Request<Streaming<WriteArchiveInput>>,
    ) -> Result<Response<WriteArchiveResponse>, Status> {
        let mut inputs = request.into_inner();
        let Some(ArchiveInput::Open(open)) = inputs.message().await?.and_then(|first| first.input) else {
            return Err(Status::invalid_argument("the first message must be `open`"));
        };
        archive::serve_write(&self.0, open, inputs).await
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        watch::serve(request.into_inner()).await
    }
}

/// Work on files, away from the reactor.
pub(crate) async fn work<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Status> {
    Ok(crate::blocking(work).await??)
}
