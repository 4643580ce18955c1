//! Ports over a real connection: how a connection that breaks on the host looks to the program in the guest.
#![expect(clippy::unwrap_used, reason = "part of a test, though not a test function")]

mod agent;

use std::io::ErrorKind;

use bytes::Bytes;
use imp_protocol::guest::forward_input::Input;
use imp_protocol::guest::{CloseStdin, ForwardInput, OpenPort};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use self::agent::Host;

/// A connection through the agent: the host's inputs and outputs, and the program's end.
async fn connection(
    host: &Host,
) -> (mpsc::Sender<ForwardInput>, tonic::Streaming<imp_protocol::guest::ForwardOutput>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = u32::from(listener.local_addr().unwrap().port());
    let (inputs, stream) = mpsc::channel(4);
    inputs.send(message(Input::Open(OpenPort { port, address: String::new() }))).await.unwrap();
    let outputs = host.ports().forward(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let (program, _) = listener.accept().await.unwrap();
    (inputs, outputs, program)
}

fn message(input: Input) -> ForwardInput {
    ForwardInput { input: Some(input) }
}

#[tokio::test]
async fn what_was_not_said_to_its_end_does_not_pass_for_all_of_it() {
    let host = Host::connect().await;
    // The inputs alone end, or the host lets go of both directions.
    for lets_go in [false, true] {
        let (inputs, outputs, mut program) = connection(&host).await;
        inputs.send(message(Input::Data(Bytes::from_static(b"half")))).await.unwrap();
        let mut half = [0; 4];
        program.read_exact(&mut half).await.unwrap();
        drop(inputs);
        let held = (!lets_go).then_some(outputs);
        let error = program.read(&mut half).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "lets go: {lets_go}");
        drop(held);
    }
}

#[tokio::test]
async fn what_was_said_to_its_end_is_whole_also_when_nobody_waits_for_an_answer() {
    let host = Host::connect().await;
    let (inputs, outputs, mut program) = connection(&host).await;
    inputs.send(message(Input::Data(Bytes::from_static(b"all")))).await.unwrap();
    inputs.send(message(Input::ShutDownWrite(CloseStdin {}))).await.unwrap();
    let mut all = Vec::new();
    program.read_to_end(&mut all).await.unwrap();
    assert_eq!(all, b"all");
    drop((inputs, outputs));
}
