//! The agent's services over a real connection, on this machine: processes, files and ports of a temporary directory.

mod agent;

use bytes::Bytes;
use imp_protocol::guest::exec_input::Input;
use imp_protocol::guest::exec_output::Output;
use imp_protocol::guest::exit_status::How;
use imp_protocol::guest::{
    AttachProcess, CloseStdin, ExecInput, ExitStatus, ProcessLimits, ProcessSpec, SignalRequest, Terminal,
    WaitRequest, signal_request,
};
use tonic::Code;

use self::agent::{Exec, Host, collect, sh};

#[tokio::test]
async fn arguments_are_literal_and_the_environment_is_only_what_was_given() {
    let host = Host::connect().await;
    let arguments = ["/usr/bin/printf", "%s|", "$HOME `x`", "a\nb", "'\""];
    let spec =
        ProcessSpec { arguments: arguments.map(Bytes::from_static_str).to_vec(), ..Default::default() };
    let end = collect(host.exec(spec).await).await;
    assert_eq!((end.stdout.as_str(), end.code()), ("$HOME `x`|a\nb|'\"|", Some(0)));
    let spec = ProcessSpec {
        arguments: vec!["/usr/bin/env".into()],
        environment: vec!["A=1".into(), "A=2".into()],
        ..Default::default()
    };
    assert_eq!(collect(host.exec(spec).await).await.stdout, "A=2\nHOME=/root\n");
}

trait StaticStr {
    fn from_static_str(text: &'static str) -> Bytes;
}

impl StaticStr for Bytes {
    fn from_static_str(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }
}

#[tokio::test]
async fn an_exit_is_told_by_code_by_signal_and_by_what_could_not_start() {
    let host = Host::connect().await;
    assert_eq!(collect(host.exec(sh("exit 7")).await).await.code(), Some(7));
    assert_eq!(collect(host.exec(sh("kill -9 $$")).await).await.exit.how, Some(How::Signal(9)));
    let start = async |program: &'static str| {
        let spec = ProcessSpec { arguments: vec![program.into()], ..Default::default() };
        collect(host.exec(spec).await).await.exit
    };
    for (program, code) in
        [("no-such-program", 127), ("/nonexistent", 127), ("/etc", 126), ("/etc/passwd", 126)]
    {
        let exit = start(program).await;
        assert!(
            matches!(exit, ExitStatus { how: Some(How::NotStarted(_)), start_code, .. } if start_code == code),
            "{exit:?}"
        );
    }
}

#[tokio::test]
async fn the_user_and_the_directory_are_those_asked_for() {
    let host = Host::connect().await;
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("a/b");
    std::os::unix::fs::chown(directory.path(), Some(65_534), None).unwrap();
    let spec = ProcessSpec {
        user: "nobody".into(),
        working_directory: missing.to_str().unwrap().to_owned().into(),
        ..sh("id -u; id -g; pwd")
    };
    let end = collect(host.exec(spec).await).await;
    assert_eq!(end.stdout, format!("65534\n65534\n{}\n", missing.display()));
    let refused = host.refused(ProcessSpec { user: "no-such-user".into(), ..sh("true") }).await;
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("/etc/passwd"), "{refused}");
}

#[tokio::test]
async fn input_reaches_the_process_and_its_end_too() {
    let host = Host::connect().await;
    let mut exec = host.exec(ProcessSpec { stdin: true, ..sh("cat; echo done >&2") }).await;
    for part in ["one ", "two"] {
        exec.send(Input::Stdin(part.into())).await;
    }
    exec.send(Input::CloseStdin(CloseStdin {})).await;
    let end = collect(exec).await;
    assert_eq!((end.stdout.as_str(), end.stderr.as_str(), end.code()), ("one two", "done\n", Some(0)));
}

#[tokio::test]
async fn keystrokes_sent_together_with_the_open_of_a_terminal_are_not_lost() {
    let host = Host::connect().await;
    let spec = ProcessSpec {
        terminal: Some(Terminal { rows: 30, columns: 100, term: "dumb".into() }),
        stdin: true,
        ..sh("stty size; read line; echo got:$line:$TERM; tty")
    };
    let first = [Input::Start(spec), Input::Stdin("typed\n".into())];
    let end = collect(host.exec_with(first.into()).await).await;
    assert!(end.stdout.contains("30 100\r\n") && end.stdout.contains("got:typed:dumb\r\n"), "{}", end.stdout);
    assert!(end.stdout.contains("/dev/pts/") && end.stderr.is_empty(), "{}", end.stdout);
}

#[tokio::test]
async fn a_terminal_is_resized_and_its_process_told() {
    let host = Host::connect().await;
    let script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.01; done";
    let spec = ProcessSpec { terminal: Some(Terminal::default()), ..sh(script) };
    let mut exec = host.exec(spec).await;
    exec.until("ready").await;
    exec.send(Input::Resize(Terminal { rows: 5, columns: 6, term: String::new() })).await;
    assert!(collect(exec).await.stdout.contains("5 6"));
}

#[tokio::test]
async fn an_exec_ends_with_its_main_process_although_a_child_holds_its_output() {
    let host = Host::connect().await;
    let mut exec = host.exec(sh("sleep 1000 & echo $!")).await;
    let child = exec.until("\n").await.trim().to_owned();
    let end = collect(exec).await;
    assert_eq!(end.code(), Some(0));
    assert!(agent::is_alive(&child), "the background child goes on");
    agent::kill(&child);
}

#[tokio::test]
async fn breaking_the_stream_kills_the_whole_tree_also_what_has_daemonised() {
    let host = Host::connect().await;
    let script = "setsid sh -c 'setsid sleep 1000 & echo $!; wait' & wait";
    let mut exec = host.exec(sh(script)).await;
    let daemon = exec.until("\n").await.trim().to_owned();
    assert!(agent::is_alive(&daemon));
    drop(exec);
    agent::until(|| !agent::is_alive(&daemon)).await;
}

#[tokio::test]
async fn a_detached_process_outlives_its_stream_and_is_attached_to() {
    let host = Host::connect().await;
    let spec = ProcessSpec { id: "job".into(), detach: true, stdin: true, ..sh("echo first; cat") };
    let mut exec = host.exec(spec.clone()).await;
    exec.until("first\n").await;
    assert_eq!(host.refused(spec).await.code(), Code::AlreadyExists);
    drop(exec);
    let attach = AttachProcess { id: "job".into(), stdin: true, from_offset: 2, paced: false };
    let mut exec = host.exec_with(vec![Input::Attach(attach)]).await;
    exec.send(Input::Stdin("second\n".into())).await;
    exec.until("second\n").await;
    exec.send(Input::CloseStdin(CloseStdin {})).await;
    let end = collect(exec).await;
    assert_eq!((end.stdout.as_str(), end.code()), ("rst\nsecond\n", Some(0)));
    let wait = |acknowledge| WaitRequest { id: "job".into(), acknowledge };
    assert!(host.processes().wait(wait(true)).await.unwrap().into_inner().status.is_some());
    assert_eq!(host.processes().wait(wait(false)).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_timeout_kills_and_says_so() {
    let host = Host::connect().await;
    let limits = Some(ProcessLimits { timeout_milliseconds: 50, ..Default::default() });
    let exit = collect(host.exec(ProcessSpec { limits, ..sh("sleep 1000") }).await).await.exit;
    assert_eq!((exit.how, exit.timed_out), (Some(How::Signal(9)), true));
}

#[tokio::test]
async fn input_that_nobody_reads_does_not_hold_up_a_signal() {
    let host = Host::connect().await;
    let spec = ProcessSpec { stdin: true, paced: true, ..sh("echo ready; sleep 1000") };
    let mut exec = host.exec(spec).await;
    exec.until("ready").await;
    let window = exec.stdin_window();
    assert!(window > 128 << 10, "{window}");
    for _ in 0..window >> 15 {
        exec.send(Input::Stdin(vec![0; 32 << 10].into())).await;
    }
    exec.send(Input::Signal("KILL".into())).await;
    assert_eq!(collect(exec).await.exit.how, Some(How::Signal(9)));
}

#[tokio::test]
async fn a_paced_host_is_told_of_all_its_input_once_it_is_taken() {
    let host = Host::connect().await;
    let mut exec =
        host.exec(ProcessSpec { stdin: true, paced: true, ..sh("cat >/dev/null; sleep 1000") }).await;
    for _ in 0..5 {
        exec.send(Input::Stdin(vec![0; 50_000].into())).await;
    }
    exec.until_taken(250_000).await;
    exec.send(Input::CloseStdin(CloseStdin {})).await;
    // What comes too late is nobody's, and still counts.
    exec.send(Input::Stdin(vec![0; 7].into())).await;
    exec.until_taken(250_007).await;
}

#[tokio::test]
async fn a_signal_reaches_the_whole_tree() {
    let host = Host::connect().await;
    let script = "sh -c 'trap \"echo child; exit\" TERM; echo ready; while :; do sleep 0.01; done' & trap '' TERM; wait; wait";
    let mut exec = host.exec(ProcessSpec { id: "tree".into(), ..sh(script) }).await;
    exec.until("ready").await;
    let target = Some(signal_request::Target::Id("tree".into()));
    let request = SignalRequest { target, signal: "SIGTERM".into(), whole_tree: true };
    host.processes().signal(request).await.unwrap();
    assert!(collect(exec).await.stdout.ends_with("child\n"));
    let target = Some(signal_request::Target::Id("other".into()));
    let unknown = SignalRequest { target, signal: "TERM".into(), whole_tree: false };
    assert_eq!(host.processes().signal(unknown).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_signal_by_pid_reaches_also_a_process_that_the_agent_has_not_started() {
    let host = Host::connect().await;
    let mut other = tokio::process::Command::new("sleep").arg("1000").kill_on_drop(true).spawn().unwrap();
    let signal = async |pid: u32| {
        let target = Some(signal_request::Target::Pid(pid));
        let request = SignalRequest { target, signal: "KILL".into(), whole_tree: true };
        host.processes().signal(request).await.map_err(|status| status.code())
    };
    signal(other.id().unwrap()).await.unwrap();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(other.wait().await.unwrap().signal(), Some(9));
    assert_eq!(signal(1).await.unwrap_err(), Code::PermissionDenied);
    assert_eq!(signal(std::process::id()).await.unwrap_err(), Code::PermissionDenied);
    assert_eq!(signal(0).await.unwrap_err(), Code::NotFound);
    assert_eq!(signal(u32::MAX).await.unwrap_err(), Code::NotFound);
}

#[tokio::test]
async fn a_process_that_floods_a_slow_reader_stops_only_itself() {
    let host = Host::connect().await;
    let flood = host.exec(sh("head -c 20000000 /dev/zero")).await;
    assert_eq!(collect(host.exec(sh("echo other")).await).await.stdout, "other\n");
    assert_eq!(collect(flood).await.stdout.len(), 20_000_000);
}

#[tokio::test]
async fn many_processes_run_at_once() {
    let host = Host::connect().await;
    let mut running = Vec::new();
    for number in 0..40 {
        running.push((number, host.exec(sh("read x; echo $x").with_stdin()).await));
    }
    for (number, exec) in &mut running {
        exec.send(Input::Stdin(format!("{number}\n").into())).await;
    }
    for (number, exec) in running {
        assert_eq!(collect(exec).await.stdout, format!("{number}\n"));
    }
}

trait WithStdin {
    fn with_stdin(self) -> Self;
}

impl WithStdin for ProcessSpec {
    fn with_stdin(mut self) -> Self {
        self.stdin = true;
        self
    }
}

#[tokio::test]
async fn a_stream_that_starts_with_nonsense_is_refused() {
    let host = Host::connect().await;
    let (sender, inputs) = tokio::sync::mpsc::channel(1);
    sender.send(ExecInput { input: Some(Input::Stdin("x".into())) }).await.unwrap();
    let stream = tokio_stream::wrappers::ReceiverStream::new(inputs);
    let mut answer = host.processes().exec(stream).await.unwrap().into_inner();
    assert_eq!(answer.message().await.unwrap_err().code(), Code::InvalidArgument);
    assert!(matches!(Exec::first_of(host.exec(sh("true")).await).await, Output::Started(_)));
}
