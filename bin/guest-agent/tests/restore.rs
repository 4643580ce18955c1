//! Sleep for a snapshot, over a real connection on this machine. To wake changes the machine: that is tested in guests.

mod agent;

use std::time::Duration;

use imp_protocol::guest::exec_input::Input;
use imp_protocol::guest::{
    ListProcessesRequest, NewMachine, PingRequest, SleepRequest, StatRequest, WakeRequest, wake_request,
};
use tonic::Code;

use self::agent::{Host, sh};

fn echo() -> imp_protocol::guest::ProcessSpec {
    imp_protocol::guest::ProcessSpec { stdin: true, ..sh("echo up; exec cat") }
}

#[tokio::test]
async fn a_machine_that_sleeps_serves_nothing_else_and_goes_on_by_itself_when_its_host_is_gone() {
    let host = Host::connect().await;
    let mut exec = host.exec(echo()).await;
    exec.until("up").await;
    let sleep = async |at_most_milliseconds| {
        let asleep = host.restore().sleep(SleepRequest { at_most_milliseconds }).await;
        asleep.unwrap().into_inner().frozen
    };
    assert_eq!(sleep(0).await, 1);
    let refused = host.processes().list(ListProcessesRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let stat = StatRequest { path: "/".into(), follow_links: false };
    assert_eq!(host.files().stat(stat).await.unwrap_err().code(), Code::Unavailable);
    host.machine().ping(PingRequest::default()).await.unwrap();
    // The process has it, and does not run.
    exec.send(Input::Stdin("heard\n".into())).await;
    assert_eq!(sleep(1).await, 1);
    let awake = async {
        while host.processes().list(ListProcessesRequest {}).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), awake).await.unwrap();
    exec.until("heard").await;
}

#[tokio::test]
async fn a_wake_that_makes_no_sense_leaves_the_machine_asleep() {
    let host = Host::connect().await;
    host.restore().sleep(SleepRequest::default()).await.unwrap();
    let secret = NewMachine { secrets: vec!["hunter2".into()], ..NewMachine::default() };
    for request in [
        WakeRequest::default(),
        WakeRequest { r#as: Some(wake_request::As::New(secret)), unix_time_nanoseconds: 1 },
    ] {
        let refused = host.restore().wake(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(!refused.message().contains("hunter2"), "{refused}");
    }
    let refused = host.processes().list(ListProcessesRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
}
