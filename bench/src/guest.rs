//! Calls to a guest's agent, each the smallest of its kind.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use imp_protocol::connection::Connection;
use imp_protocol::guest::exec_input::Input;
use imp_protocol::guest::exec_output::Output;
use imp_protocol::guest::exit_status::How;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::machine_client::MachineClient;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::write_file_input::Input as WriteInput;
use imp_protocol::guest::{
    ConfigureRequest, ExecInput, OpenForWrite, PingRequest, ProcessSpec, ReadFileRequest, WriteFileInput,
};

/// Bytes in one message of a file on its way in: as many as in one of `imp cp`.
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

pub(crate) async fn write(guest: &Connection, path: &str, size: usize) -> anyhow::Result<()> {
    let open = OpenForWrite { path: path.as_bytes().to_vec().into(), ..OpenForWrite::default() };
    let chunk = bytes::Bytes::from(vec![0x5a; CHUNK]);
    let chunks = (0..size / CHUNK).map(move |_| WriteInput::Data(chunk.clone()));
    let inputs = std::iter::once(WriteInput::Open(open)).chain(chunks);
    let inputs = tokio_stream::iter(inputs.map(|input| WriteFileInput { input: Some(input) }));
    FilesClient::new(guest.clone()).write(inputs).await?;
    Ok(())
}

pub(crate) async fn read(guest: &Connection, path: &str, size: usize) -> anyhow::Result<()> {
    let request = ReadFileRequest { path: path.as_bytes().to_vec().into(), ..ReadFileRequest::default() };
    let mut chunks = FilesClient::new(guest.clone()).read(request).await?.into_inner();
    let mut read = 0;
    while let Some(chunk) = chunks.message().await? {
        read += chunk.data.len();
    }
    ensure!(read == size, "{read} bytes were read, not {size}");
    Ok(())
}
