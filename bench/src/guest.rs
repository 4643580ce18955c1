//! Calls to a guest's agent, each the smallest of its kind.

use std::io::{self, BufWriter, Read as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::exec_input::Input;
use imp_protocol::guest::exec_output::Output;
use imp_protocol::guest::exit_status::How;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::machine_client::MachineClient;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::write_archive_input::Input as WriteInput;
use imp_protocol::guest::{
    ConfigureRequest, ExecInput, OpenArchive, PingRequest, ProcessSpec, ReadArchiveRequest, WriteArchiveInput,
};
use imp_protocol::lane::{self, Lane};

/// Bytes in one chunk of a file on its way in: as many as in one of `imp cp`.
const CHUNK: usize = 256 << 10;

pub(crate) async fn ping(guest: &Connection) -> anyhow::Result<()> {
    MachineClient::new(guest.clone()).ping(PingRequest { nonce: b"bench".to_vec().into() }).await?;
    Ok(())
}

pub(crate) async fn configure(guest: &Connection) -> anyhow::Result<()> {
    let entropy = vec![7; 32].into();
    let request = ConfigureRequest { hostname: "bare".into(), entropy, ..ConfigureRequest::default() };
    MachineClient::new(guest.clone()).configure(request).await?;
    Ok(())
}

/// Runs a program to its end and returns what it wrote; any exit code but 0 is an error.
pub(crate) async fn exec(guest: &Connection, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
    let spec = ProcessSpec {
        arguments: arguments.iter().map(|word| word.as_bytes().to_vec().into()).collect(),
        environment: vec![b"PATH=/bin:/usr/bin".to_vec().into()],
        ..ProcessSpec::default()
    };
    // The input stays open: its end would end a process that is not detached.
    let (input, inputs) = tokio::sync::mpsc::channel(1);
    input.send(ExecInput { input: Some(Input::Start(spec)) }).await?;
    let inputs = tokio_stream::wrappers::ReceiverStream::new(inputs);
    let mut outputs = ProcessesClient::new(guest.clone()).exec(inputs).await?.into_inner();
    let mut written = Vec::new();
    while let Some(output) = outputs.message().await? {
        match output.output {
            Some(Output::Stdout(bytes)) => written.extend_from_slice(&bytes),
            Some(Output::Exited(status)) => {
                ensure!(status.how == Some(How::Code(0)), "{arguments:?} ended with {:?}", status.how);
                return Ok(written);
            }
            Some(Output::Started(_) | Output::Stderr(_) | Output::Dropped(_) | Output::StdinTaken(_))
            | None => {}
        }
    }
    bail!("{arguments:?} has no end")
}

/// How long the guest itself says that a shell script takes, without starting the shell.
pub(crate) async fn timed(guest: &Connection, script: &str) -> anyhow::Result<Duration> {
    let now = "read up idle < /proc/uptime; echo $up";
    let output = exec(guest, &["sh", "-c", &format!("{now}; {script}; {now}")]).await?;
    let output = String::from_utf8(output)?;
    let times: Result<Vec<f64>, _> = output.split_whitespace().map(str::parse).collect();
    let times = times.context("the guest's clock")?;
    match times.as_slice() {
        [start, end] => Ok(Duration::from_secs_f64(end - start)),
        _ => bail!("the guest's clock says {output}"),
    }
}

/// A new file of this name in /, over the lane and in an archive, as `imp cp` does it.
pub(crate) async fn copy_in(
    guest: &Connection,
    mut lane: Lane,
    name: &'static str,
    size: u64,
) -> anyhow::Result<()> {
    let open =
        OpenArchive { path: Bytes::from_static(b"/"), lane: Some(lane.number()), ..Default::default() };
    let inputs = tokio_stream::iter([WriteArchiveInput { input: Some(WriteInput::Open(open)) }]);
    // Until the answer: a VMM drops what it has not read when this end hangs up.
    let _open = lane.clone();
    let packing = tokio::task::spawn_blocking(move || -> anyhow::Result<()> {
        lane.taken()?;
        let mut chunks = lane::Writer::new(lane);
        let mut archive = tar::Builder::new(BufWriter::with_capacity(CHUNK, &mut chunks));
        let mut header = tar::Header::new_gnu();
        header.set_size(size);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        archive.append_data(&mut header, name, io::repeat(0x5a).take(size))?;
        archive.into_inner()?.flush()?;
        Ok(chunks.finish()?)
    });
    let written = FilesClient::new(guest.clone()).write_archive(inputs).await?.into_inner();
    packing.await??;
    ensure!(written.bytes == size, "{} bytes were written, not {size}", written.bytes);
    Ok(())
}

/// Reads that file back in the same way.
pub(crate) async fn copy_out(
    guest: &Connection,
    mut lane: Lane,
    name: &'static str,
    size: u64,
) -> anyhow::Result<()> {
    let path = Bytes::from(format!("/{name}"));
    let request = ReadArchiveRequest { path, lane: Some(lane.number()), ..Default::default() };
    let mut call = FilesClient::new(guest.clone()).read_archive(request).await?.into_inner();
    let unpacking = tokio::task::spawn_blocking(move || -> anyhow::Result<u64> {
        lane.taken()?;
        let mut chunks = lane::Reader::new(lane);
        let mut archive = tar::Archive::new(&mut chunks);
        let mut file = archive.entries()?.next().context("an archive without a file")??;
        let (mut buffer, mut read) = (vec![0; CHUNK], 0);
        loop {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            read += count as u64;
        }
        io::copy(&mut chunks, &mut io::sink())?;
        Ok(read)
    });
    while call.message().await?.is_some() {}
    let read = unpacking.await??;
    ensure!(read == size, "{read} bytes were read, not {size}");
    Ok(())
}
