use std::sync::Mutex;
use std::time::SystemTime;

use imp_protocol::connection;
use imp_protocol::guest::processes_server::{Processes, ProcessesServer};
use imp_protocol::guest::{
    ExitStatus, ListProcessesRequest, ListProcessesResponse, ProcessStarted, SignalRequest, SignalResponse,
    WaitRequest, WaitResponse, exit_status,
};
use tokio::sync::oneshot;
use tonic::{Request, Response};

use super::*;

/// What has not come by then never will.
const DEADLINE: Duration = Duration::from_secs(60);

/// A guest that says this in its first call.
struct Guest {
    says: Mutex<Vec<Result<exec_output::Output, Status>>>,
    heard: mpsc::UnboundedSender<exec_input::Input>,
}

#[tonic::async_trait]
impl Processes for Guest {
    type ExecStream = ReceiverStream<Result<ExecOutput, Status>>;

    async fn exec(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let (answers, stream) = mpsc::channel(1);
        let says = std::mem::take(&mut *self.says.lock().unwrap());
        let (heard, mut inputs) = (self.heard.clone(), request.into_inner());
        tokio::spawn(async move {
            for said in says {
                // Input is heard before each output.
                if let Some(input) = inputs.message().await.ok().flatten().and_then(|input| input.input) {
                    let _ = heard.send(input);
                }
                let _ = answers.send(said.map(|output| ExecOutput { output: Some(output) })).await;
            }
            answers.closed().await;
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn list(
        &self,
        _: Request<ListProcessesRequest>,
    ) -> Result<Response<ListProcessesResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn signal(&self, _: Request<SignalRequest>) -> Result<Response<SignalResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn wait(&self, _: Request<WaitRequest>) -> Result<Response<WaitResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
}

/// A connection to such a guest, the inputs that it hears, and what breaks the channel when it is dropped.
async fn guest(
    says: Vec<Result<exec_output::Output, Status>>,
) -> (Connection, mpsc::UnboundedReceiver<exec_input::Input>, oneshot::Sender<()>) {
    let (heard, hears) = mpsc::unbounded_channel();
    let (channel, broken) = oneshot::channel();
    let (near, far) = tokio::io::duplex(64 << 10);
    let guest = Guest { says: Mutex::new(says), heard };
    tokio::spawn(async move {
        let serving = connection::serve(far, tonic::service::Routes::new(ProcessesServer::new(guest)));
        tokio::select! {
            _ = serving => {}
            _ = broken => {}
        }
    });
    (connection::connect_owner(near).await.unwrap(), hears, channel)
}

/// Passes on what a guest says whose channel breaks after that, and returns the inputs that it heard.
async fn broken(
    relay: &mut Relay,
    seen: &mut Seen,
    says: Vec<exec_output::Output>,
) -> mpsc::UnboundedReceiver<exec_input::Input> {
    let count = says.len();
    let (connection, hears, channel) = guest(says.into_iter().map(Ok).collect()).await;
    let breaks = async {
        for _ in 0..count {
            seen.next().await;
        }
        drop(channel);
    };
    let (passed, ()) = tokio::join!(relay.pass(connection), breaks);
    assert_eq!(passed.unwrap(), Passed::Broke);
    hears
}

struct Seen {
    inputs: mpsc::Sender<Result<AttachInput, Status>>,
    answers: mpsc::Receiver<Result<AttachOutput, Status>>,
    outputs: Vec<exec_output::Output>,
}

fn relay(stdin: Stdin, position: u64) -> (Relay, Seen) {
    let (inputs, stream) = mpsc::channel(8);
    let (answers, seen) = mpsc::channel(64);
    let client = Client::new(Box::pin(ReceiverStream::new(stream)), stdin, answers);
    (Relay::new(client, position), Seen { inputs, answers: seen, outputs: Vec::new() })
}

impl Seen {
    async fn send(&self, input: exec_input::Input) {
        let message = attach_input::Message::Input(ExecInput { input: Some(input) });
        self.inputs.send(Ok(AttachInput { message: Some(message) })).await.unwrap();
    }

    async fn next(&mut self) {
        let answer = tokio::time::timeout(DEADLINE, self.answers.recv()).await.expect("one more answer");
        match answer.unwrap().unwrap().message.unwrap() {
            attach_output::Message::Output(output) => self.outputs.push(output.output.unwrap()),
            attach_output::Message::Failed(_) => panic!("not said in this test"),
        }
    }

    /// All outputs, of which so many are still to come.
    async fn all(&mut self, more: usize) -> &[exec_output::Output] {
        for _ in 0..more {
            self.next().await;
        }
        assert!(self.answers.is_empty());
        &self.outputs
    }
}

fn out(text: &'static str) -> exec_output::Output {
    exec_output::Output::Stdout(text.into())
}

fn started() -> exec_output::Output {
    exec_output::Output::Started(ProcessStarted { stdin_window: 100, ..Default::default() })
}

fn exited() -> exec_output::Output {
    exec_output::Output::Exited(ExitStatus { how: Some(exit_status::How::Code(0)), ..Default::default() })
}

fn stdin(text: &'static str) -> exec_input::Input {
    exec_input::Input::Stdin(text.into())
}

fn offset(input: Option<exec_input::Input>) -> u64 {
    match input {
        Some(exec_input::Input::Attach(attach)) => attach.from_offset,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn after_a_break_output_and_input_go_on_where_they_were() {
    let taken = exec_output::Output::StdinTaken;
    let (mut relay, mut seen) = relay(Stdin::Once, 10);
    seen.send(stdin("one")).await;
    let mut hears = broken(&mut relay, &mut seen, vec![started(), taken(3)]).await;
    assert_eq!(offset(hears.recv().await), 10);
    assert_eq!(hears.recv().await, Some(stdin("one")));
    let mut hears = broken(&mut relay, &mut seen, vec![out("abc")]).await;
    assert_eq!(offset(hears.recv().await), 10);
    seen.send(stdin("more")).await;
    let mut hears = broken(&mut relay, &mut seen, vec![started(), taken(4)]).await;
    assert_eq!(offset(hears.recv().await), 13);
    assert_eq!(hears.recv().await, Some(stdin("more")));
    seen.send(exec_input::Input::CloseStdin(CloseStdin {})).await;
    let said = vec![Ok(exec_output::Output::Dropped(5)), Ok(exited())];
    let (connection, _hears, _channel) = guest(said).await;
    assert_eq!(relay.pass(connection).await.unwrap(), Passed::Exited);
    let expected =
        [started(), taken(3), out("abc"), taken(3), taken(7), exec_output::Output::Dropped(5), exited()];
    assert_eq!(seen.all(2).await, expected);
    assert_eq!(relay.position, 18);
}

#[tokio::test]
async fn input_that_may_be_lost_is_an_error_where_all_of_it_counts() {
    for (kind, fine) in [(Stdin::Once, false), (Stdin::Shared, true)] {
        let (mut relay, mut seen) = relay(kind, 0);
        seen.send(stdin("one")).await;
        broken(&mut relay, &mut seen, vec![started(), out("x")]).await;
        let (connection, _hears, _channel) = guest(vec![Ok(exited())]).await;
        let passed = relay.pass(connection).await;
        assert_eq!(passed.as_ref().map_err(Status::code).err(), (!fine).then_some(Code::DataLoss));
    }
}

#[tokio::test]
async fn a_refusal_of_the_guest_is_not_taken_for_a_break() {
    let (mut relay, _seen) = relay(Stdin::None, 0);
    let (connection, _hears, _channel) = guest(vec![Err(Status::not_found("main"))]).await;
    assert_eq!(relay.pass(connection).await.unwrap(), Passed::Gone);
    let (connection, _hears, _channel) = guest(vec![Err(Status::resource_exhausted("full"))]).await;
    let refused = relay.pass(connection).await.unwrap_err();
    assert!(refused.code() == Code::Unavailable && refused.message().contains("full"), "{refused:?}");
}

#[tokio::test]
async fn what_the_log_lacks_is_told_when_it_is_replayed() {
    let (mut relay, mut seen) = relay(Stdin::None, 10);
    let entry = |offset, data: &[u8]| LogEntry {
        stream: LogStream::Stdout,
        at: SystemTime::UNIX_EPOCH,
        offset,
        data: data.to_vec(),
    };
    for entry in [entry(0, b"before"), entry(8, b"xxab"), entry(12, b"c"), entry(20, b"d")] {
        relay.replay(entry).await.unwrap();
    }
    // A note stands behind what is missing, and is nothing that the program has said.
    let note = |offset| LogEntry { stream: LogStream::Note, ..entry(offset, b"some bytes are missing here") };
    for entry in [note(8), note(30), entry(30, b"e")] {
        relay.replay(entry).await.unwrap();
    }
    let missing = exec_output::Output::Dropped;
    assert_eq!(seen.all(6).await, [out("ab"), out("c"), missing(7), out("d"), missing(9), out("e")]);
}
