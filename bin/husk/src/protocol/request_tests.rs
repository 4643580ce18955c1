use proptest::prelude::*;

use super::*;

const DIGEST: &str = "abababababababababababababababababababababababababababababababab";

fn activation(line: &str) -> Result<Activate, Invalid> {
    match first(line.as_bytes())? {
        First::Activate(activate) => Ok(*activate),
        First::Op { op, .. } => panic!("{op:?}"),
    }
}

#[test]
fn a_line_without_an_op_is_an_activation_and_one_with_an_op_announces_the_next_line() {
    let line = format!(
        r#"{{"snapshot_dir":"/s/one","expected_digest":"{DIGEST}","env":{{"A":"b"}},"secrets":{{"T":"s"}},"vm_id":"husk-1"}}"#
    );
    let activate = activation(&line).unwrap();
    let snapshot = activate.snapshot.unwrap();
    assert_eq!((snapshot.directory.to_str(), snapshot.trust), (Some("/s/one"), Trust::Digest));
    assert_eq!(snapshot.expected.unwrap().hex(), DIGEST);
    assert_eq!(
        (activate.environment.expose(), activate.secrets.expose()),
        (&[b"A=b".to_vec()][..], &[b"T=s".to_vec()][..])
    );
    assert_eq!((activate.reach, activate.vm.unwrap().as_str()), (Reach::Nothing, "husk-1"));
    for (line, expected, milliseconds) in [
        (r#"{"op":""}"#, Op::Activate, None),
        (r#"{"op":"activate"}"#, Op::Activate, None),
        (r#"{"op":"prepare","deadline_ms":5}"#, Op::Prepare, Some(5)),
        (r#"{"op":"fork-snapshot"}"#, Op::ForkSnapshot, None),
        (r#"{"op":"remove-fork-snapshot"}"#, Op::RemoveForkSnapshot, None),
        (r#"{"op":"status","deadline_ms":null}"#, Op::Status, None),
    ] {
        let First::Op { op, deadline } = first(line.as_bytes()).unwrap() else { panic!("{line}") };
        assert_eq!((op, deadline), (expected, milliseconds.map(Duration::from_millis)), "{line}");
    }
}

#[test]
fn fields_that_are_null_or_empty_say_nothing() {
    let line =
        r#"{"snapshot_dir":"","env":null,"volumes":[],"token":"","inbound":false,"network":{},"egress":""}"#;
    let activate = activation(line).unwrap();
    assert!(activate.snapshot.is_none() && activate.environment.expose().is_empty());
}

#[test]
fn what_a_husk_cannot_do_is_refused_by_name_and_never_left_out() {
    for (field, value) in [
        ("network_overrides", r#"[{"iface_id":"eth0","host_dev_name":"tap0"}]"#),
        ("network", r#"{"guest_ip":"10.0.0.2"}"#),
        ("volumes", r#"[{"device":"/dev/vdc"}]"#),
        ("token", r#""secret""#),
        ("allow", r#"["example.org"]"#),
        ("allow_cidrs", r#"["10.0.0.0/8"]"#),
        ("inbound", r#""allow""#),
        ("inbound_cidrs", "7"),
    ] {
        let error = activation(&format!("{{\"{field}\":{value}}}")).unwrap_err();
        assert_eq!(error, Invalid::Unsupported { field });
    }
}

#[test]
fn malformed_requests_are_refused_for_what_is_wrong_with_them() {
    let field = |line: &str| match activation(line).unwrap_err() {
        Invalid::Field { field, .. } | Invalid::Variables { field, .. } => field,
        error => panic!("{line}: {error}"),
    };
    for (line, expected) in [
        (r#"{"snapshot_dir":"/s"}"#, "expected_digest"),
        (r#"{"expected_digest":"abc"}"#, "expected_digest"),
        (r#"{"snapshot_dir":"s","fork_snapshot":true}"#, "snapshot_dir"),
        (r#"{"snapshot_dir":"/s/../t","fork_snapshot":true}"#, "snapshot_dir"),
        (r#"{"egress":"some"}"#, "egress"),
        (r#"{"egress":"allow","block_network":true}"#, "block_network"),
        (r#"{"vm_id":"../x"}"#, "vm_id"),
        (r#"{"env":{"A=B":""}}"#, "env"),
        (r#"{"secrets":{"":""}}"#, "secrets"),
    ] {
        assert_eq!(field(line), expected, "{line}");
    }
    for line in ["", "{", "[]", "7", "null", r#"{"unknown":1}"#, r#"{"op":"status","x":1}"#, r#"{"op":null}"#]
    {
        let error = first(line.as_bytes()).map(drop).unwrap_err();
        assert!(matches!(error, Invalid::NotJson { .. } | Invalid::NotARequest { .. }), "{line}: {error}");
    }
    for line in [r#"{"op":"spawn-vm"}"#, r#"{"op":"Prepare"}"#] {
        assert_eq!(first(line.as_bytes()).map(drop).unwrap_err(), Invalid::UnknownOp, "{line}");
    }
    assert!(request(Op::Prepare, b"{}").is_err());
    assert!(request(Op::ForkSnapshot, b"{}").is_err());
    assert!(request(Op::RemoveForkSnapshot, br#"{"fork_id":"a/b"}"#).is_err());
    assert!(request(Op::Status, br#"{"x":1}"#).is_err());
}

#[test]
fn an_error_holds_nothing_of_the_line() {
    for line in [
        r#"{"secrets":"hunter2"}"#,
        r#"{"secrets":{"TOKEN":7,"hunter2":1}}"#,
        r#"{"hunter2":1}"#,
        r#"{"secrets":{"A=hunter2":"hunter2"}}"#,
        r#"{"token":"hunter2"}"#,
        r#"{"op":"hunter2"}"#,
        r#"{"secrets":{"T":"hunter2"}"#,
    ] {
        let error = first(line.as_bytes()).map(drop).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

#[test]
fn a_request_to_fork_names_it_and_may_say_where_its_snapshot_is_to_be_found() {
    let Request::ForkSnapshot(fork) = request(
        Op::ForkSnapshot,
        br#"{"fork_id":"f1","snapshot_dir":"/forks/f1","pause_source":true,"require_mem_file":true}"#,
    )
    .unwrap() else {
        panic!()
    };
    assert_eq!((fork.fork.as_str(), fork.with_secrets), ("f1", false));
    assert_eq!(fork.directory.unwrap(), Path::new("/forks/f1"));
}

/// Good requests, of which parts are changed.
fn good() -> impl Strategy<Value = Vec<u8>> {
    let lines = [
        r#"{"op":"activate","deadline_ms":1000}"#.to_owned(),
        format!(
            r#"{{"snapshot_dir":"/s","expected_digest":"{DIGEST}","env":{{"A":"b"}},"secrets":{{"T":"s"}},"egress":"deny","volumes":[],"vm_id":"husk"}}"#
        ),
        r#"{"fork_id":"f","snapshot_dir":"/f","pause_source":true}"#.to_owned(),
    ];
    proptest::sample::select(lines.map(String::into_bytes).to_vec())
}

proptest! {
    #[test]
    fn whatever_a_line_holds_it_is_a_request_or_an_error(line in proptest::collection::vec(any::<u8>(), 0..300)) {
        read_all(&line);
    }

    #[test]
    fn a_damaged_request_is_a_request_or_an_error(
        mut line in good(), at in any::<proptest::sample::Index>(), byte in any::<u8>(), cut in any::<proptest::sample::Index>()
    ) {
        let at = at.index(line.len());
        line[at] = byte;
        line.truncate(cut.index(line.len() + 1));
        read_all(&line);
    }

    #[test]
    fn paths_and_ids_that_are_taken_lead_nowhere_else(text in "[./a-z_\\-]{0,12}") {
        if let Ok(path) = path(text.clone()) {
            prop_assert!(path.is_absolute() && !text.split('/').any(|part| part == ".."), "{}", text);
        }
        if let Some(id) = Id::parse(&text) {
            prop_assert_eq!(Path::new(id.as_str()).components().count(), 1);
            prop_assert!(!id.as_str().contains(['.', '/']));
        }
    }
}

fn read_all(line: &[u8]) {
    let _ = first(line);
    for op in [Op::Prepare, Op::Activate, Op::ForkSnapshot, Op::RemoveForkSnapshot, Op::Status] {
        let _ = request(op, line);
    }
}
