use std::ffi::{OsStr, OsString};
use std::num::NonZeroU16;

use clap::Parser;
use imp_runtime::spec::{
    BaseDisk, IpVersions, KernelChoice, NetworkMode, Otherwise, Stdin, Terminal, VmSpec, WhenStopped,
};
use imp_storage::image::config::ImageConfig;

use super::spec::{Error, World, spec};
use crate::args::{Arguments, Command};
use crate::settings::RunDefaults;

fn image(config: &str) -> ImageConfig {
    let text = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{config},"rootfs":{{"type":"layers","diff_ids":[]}}}}"#
    );
    ImageConfig::parse(text.as_bytes()).unwrap()
}

fn host_env(name: &OsStr) -> Option<OsString> {
    (name == "FROM_HERE").then(|| "a b$c".into())
}

struct Case<'a> {
    config: &'a str,
    defaults: RunDefaults,
    env_files: Vec<OsString>,
}

impl Default for Case<'_> {
    fn default() -> Self {
        Self { config: "{}", defaults: RunDefaults::default(), env_files: Vec::new() }
    }
}

impl Case<'_> {
    fn spec(self, line: &[&str]) -> Result<VmSpec, Error> {
        let arguments = Arguments::try_parse_from([&["imp", "run"], line].concat()).unwrap();
        let Command::Run(run) = arguments.command else { panic!("not a run") };
        let world = World {
            defaults: &self.defaults,
            base: BaseDisk { image: "image".into(), key: "key".into(), path: "/base".into() },
            made_up_name: "made_up.name".into(),
            env_files: self.env_files,
            host_env: &host_env,
            mounts: Vec::new(),
            terminal: Some(Terminal { rows: 5, columns: 6, term: "vt100".into() }),
        };
        spec(&run, &image(self.config), world)
    }
}

fn spec_of(config: &str, line: &[&str]) -> VmSpec {
    Case { config, ..Case::default() }.spec(line).unwrap()
}

fn words(spec: &VmSpec) -> Vec<String> {
    spec.main.arguments.iter().map(|word| String::from_utf8(word.to_vec()).unwrap()).collect()
}

fn environment(spec: &VmSpec) -> Vec<String> {
    let own = |variable: &String| !variable.starts_with("PATH=") && !variable.starts_with("HOSTNAME=");
    spec.main.environment.expose().iter().map(|v| String::from_utf8(v.clone()).unwrap()).filter(own).collect()
}

#[test]
fn entrypoint_and_cmd_are_merged_as_docker_does() {
    let both = r#"{"Entrypoint":["/e","x"],"Cmd":["c","d"]}"#;
    let only_cmd = r#"{"Cmd":["c","d"]}"#;
    let only_entrypoint = r#"{"Entrypoint":["/e","x"]}"#;
    let table: [(&str, &[&str], &[&str]); 12] = [
        (both, &["i"], &["/e", "x", "c", "d"]),
        (both, &["i", "a"], &["/e", "x", "a"]),
        (both, &["i", "--", "a", "-b"], &["/e", "x", "a", "-b"]),
        (both, &["--entrypoint", "/f", "i"], &["/f"]),
        (both, &["--entrypoint", "/f", "i", "a"], &["/f", "a"]),
        (both, &["--entrypoint", "", "i", "a"], &["a"]),
        (only_cmd, &["i"], &["c", "d"]),
        (only_cmd, &["i", "a"], &["a"]),
        (only_entrypoint, &["i"], &["/e", "x"]),
        (only_entrypoint, &["i", "-t", "--rm"], &["/e", "x", "-t", "--rm"]),
        (only_entrypoint, &["i", "a", "--", "b"], &["/e", "x", "a", "--", "b"]),
        (only_entrypoint, &["--", "i", "a"], &["/e", "x", "a"]),
    ];
    for (config, line, expected) in table {
        assert_eq!(words(&spec_of(config, line)), expected, "{config} {line:?}");
    }
}

#[test]
fn an_image_without_a_program_needs_a_command() {
    for (config, line) in [("{}", vec!["i"]), (r#"{"Cmd":["c"]}"#, vec!["--entrypoint", "", "i"])] {
        let error = Case { config, ..Case::default() }.spec(&line).unwrap_err();
        assert!(matches!(error, Error::NoProgram { .. }), "{error}");
        assert!(error.to_string().contains("imp run"), "{error}");
    }
}

#[test]
fn dollars_quotes_and_newlines_are_literal() {
    let odd = ["$HOME", "a \"b\" 'c'", "two\nlines", "*", "", "ünï"];
    let config =
        format!(r#"{{"Entrypoint":{},"Env":["X=$HOME \"q\"\n"]}}"#, serde_json::to_string(&odd).unwrap());
    let spec = spec_of(&config, &["-e", "Y=$X\n'", "i", "$(id)", "`id`"]);
    let mut expected: Vec<&str> = odd.to_vec();
    expected.extend(["$(id)", "`id`"]);
    assert_eq!(words(&spec), expected);
    assert_eq!(environment(&spec), ["X=$HOME \"q\"\n", "Y=$X\n'"]);
}

#[test]
fn later_variables_win_and_a_bare_name_is_taken_from_here_or_away() {
    let case = Case {
        config: r#"{"Env":["A=image","B=image","C=image"]}"#,
        env_files: vec!["A=file".into(), "B=file".into(), "FROM_HERE".into()],
        ..Case::default()
    };
    let spec = case.spec(&["-e", "B=flag", "-e", "C", "-e", "D=", "-e", "NOWHERE", "i", "x"]).unwrap();
    assert_eq!(environment(&spec), ["A=file", "B=flag", "FROM_HERE=a b$c", "D="]);
}

#[test]
fn the_image_may_set_the_search_path_and_otherwise_there_is_one() {
    let path = |config| {
        let spec = spec_of(config, &["i", "x"]);
        let path =
            spec.main.environment.expose().iter().find(|variable| variable.starts_with(b"PATH=")).cloned();
        String::from_utf8(path.unwrap()).unwrap()
    };
    assert_eq!(path(r#"{"Env":["PATH=/x"]}"#), "PATH=/x");
    assert!(path("{}").ends_with("/sbin:/bin"));
}

#[test]
fn user_directory_and_stop_signal_are_the_flags_or_else_the_images() {
    let config =
        r#"{"User":"app:staff","WorkingDir":"/app","StopSignal":"SIGQUIT","Labels":{"a":"1","b":"2"}}"#;
    let images = spec_of(config, &["i", "x"]);
    assert_eq!((images.main.user.as_str(), images.main.stop_signal.as_str()), ("app:staff", "SIGQUIT"));
    assert_eq!(images.main.working_directory.as_slice(), b"/app");
    let line = ["-u", "0", "-w", "/w", "--stop-signal", "INT", "-l", "b=3", "-l", "c", "i", "x"];
    let flags = spec_of(config, &line);
    assert_eq!((flags.main.user.as_str(), flags.main.stop_signal.as_str()), ("0", "INT"));
    assert_eq!(flags.main.working_directory.as_slice(), b"/w");
    let labels: Vec<_> = flags.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(labels, ["a=1", "b=3", "c="]);
    let error = Case::default().spec(&["-w", "w", "i", "x"]).unwrap_err();
    assert!(matches!(error, Error::RelativeWorkdir(_)), "{error}");
}

#[test]
fn a_stop_signal_that_is_none_is_refused_whoever_names_it() {
    let line = ["imp", "run", "--stop-signal", "SIGFOO", "image", "x"];
    assert!(Arguments::try_parse_from(line).is_err());
    let config = r#"{"StopSignal":"SIGFOO"}"#;
    let of_image = Case { config, ..Case::default() }.spec(&["image", "x"]).unwrap_err();
    assert!(matches!(of_image, Error::ImageStopSignal(_)), "{of_image:?}");
    // A flag makes up for it.
    let spec = spec_of(config, &["--stop-signal", "rtmin+3", "image", "x"]);
    assert_eq!(spec.main.stop_signal, "rtmin+3");
}

#[test]
fn sizes_come_from_flags_then_settings_then_defaults() {
    let spec = spec_of("{}", &["i", "x"]);
    assert_eq!((spec.cpus.get(), spec.memory.mib(), spec.scratch.mib()), (1, 256, 10 << 10));
    assert_eq!((spec.network, spec.when_stopped), (None, WhenStopped::Keep));
    assert!(spec.bridge.is_none());
    let defaults = RunDefaults {
        memory: Some("1g".into()),
        cpus: Some("2".into()),
        network: Some("none".into()),
        ..RunDefaults::default()
    };
    let spec = Case { defaults, ..Case::default() }.spec(&["-m", "128m", "--rm", "i", "x"]).unwrap();
    assert_eq!((spec.cpus.get(), spec.memory.mib()), (2, 128));
    assert_eq!((spec.network, spec.when_stopped), (Some(NetworkMode::None), WhenStopped::Remove));
    let wrong = RunDefaults { memory: Some("lots".into()), ..RunDefaults::default() };
    let error = Case { defaults: wrong, ..Case::default() }.spec(&["i", "x"]).unwrap_err();
    assert!(error.to_string().contains("run.memory"), "{error}");
}

#[test]
fn what_is_allowed_is_allowed_alone_unless_that_is_said_to_be_otherwise() {
    let egress = |line: &[&str]| {
        let line: Vec<&str> = line.iter().copied().chain(["i", "x"]).collect();
        spec_of("{}", &line).bridge.egress
    };
    assert_eq!(egress(&[]), None);
    let only = egress(&["--allow", "10.0.0.0/8:443", "--allow", "*.example.com"]).unwrap();
    assert_eq!((only.otherwise, only.allow.len()), (Otherwise::Refuse, 2));
    let denied = egress(&["--deny", "10.1.2.3/8"]).unwrap();
    assert_eq!((denied.otherwise, denied.refuse), (Otherwise::Allow, vec!["10.0.0.0/8".parse().unwrap()]));
    assert_eq!(egress(&["--egress", "deny"]).unwrap().otherwise, Otherwise::Refuse);
    let both = egress(&["--egress", "allow", "--allow", "10.0.0.1", "--deny", "10.0.0.0/8"]).unwrap();
    assert_eq!((both.otherwise, both.allow.len(), both.refuse.len()), (Otherwise::Allow, 1, 1));
    assert_eq!(spec_of("{}", &["--ipv6", "i", "x"]).bridge.versions, IpVersions::Both);
    // A flag wins over the settings file, also by what it implies.
    let defaults = RunDefaults { network: Some("user".into()), ..RunDefaults::default() };
    let spec = Case { defaults, ..Case::default() }.spec(&["--egress", "deny", "i", "x"]).unwrap();
    assert_eq!(spec.network, None);
}

#[test]
fn parts_of_processors_are_a_limit_and_whole_ones_are_not() {
    let spec = spec_of("{}", &["--cpus", "1.5", "i", "x"]);
    assert_eq!((spec.cpus.get(), spec.limits.cpu_millis), (2, Some(1500)));
    let spec = spec_of("{}", &["--cpus", "3", "i", "x"]);
    assert_eq!((spec.cpus.get(), spec.limits.cpu_millis), (3, None));
}

#[test]
fn limits_of_zero_and_minus_one_are_none() {
    let line =
        ["--pids-limit", "-1", "--disk-bps", "0", "--network-bps", "0", "--network-pps", "0", "i", "x"];
    let limits = spec_of("{}", &line).limits;
    assert_eq!(limits, imp_runtime::spec::Limits::default());
    let line =
        ["--pids-limit", "5", "--disk-bps", "1m", "--disk-iops", "70", "--ulimit", "nofile=9", "i", "x"];
    let spec = spec_of("{}", &line);
    assert_eq!((spec.limits.processes, spec.limits.disk_bytes_per_second), (Some(5), Some(1 << 20)));
    assert_eq!((spec.limits.disk_requests_per_second, spec.main.open_files), (Some(70), Some(9)));
    let limits = spec_of("{}", &["--network-bps", "2k", "--network-pps", "8", "i", "x"]).limits;
    assert_eq!((limits.network_bytes_per_second, limits.network_packets_per_second), (Some(2048), Some(8)));
}

#[test]
fn a_terminal_and_input_are_there_only_when_asked_for() {
    let spec = spec_of("{}", &["-it", "i", "x"]);
    assert_eq!(spec.main.stdin, Stdin::Attached);
    assert_eq!(spec.main.terminal, Some(Terminal { rows: 5, columns: 6, term: "vt100".into() }));
    let spec = spec_of("{}", &["i", "x"]);
    assert_eq!((spec.main.stdin, spec.main.terminal), (Stdin::Null, None));
}

#[test]
fn a_name_that_is_no_host_name_is_made_one() {
    let spec = spec_of("{}", &["i", "x"]);
    assert_eq!((spec.name.as_str(), spec.hostname.as_str()), ("made_up.name", "made-up-name"));
    let spec = spec_of("{}", &["--name", "a", "--hostname", "h", "i", "x"]);
    assert_eq!((spec.name.as_str(), spec.hostname.as_str()), ("a", "h"));
}

#[test]
fn a_kernel_is_a_file_or_the_digest_of_a_bundle() {
    assert_eq!(spec_of("{}", &["i", "x"]).kernel, KernelChoice::Default);
    let file = spec_of("{}", &["--kernel", "/boot/v", "i", "x"]).kernel;
    assert_eq!(file, KernelChoice::File("/boot/v".into()));
    let bundle = spec_of("{}", &["--kernel", "sha256:00", "i", "x"]).kernel;
    assert_eq!(bundle, KernelChoice::Bundle("sha256:00".into()));
}

#[test]
fn ports_are_passed_on() {
    let spec = spec_of("{}", &["-p", "8080:80", "i", "x"]);
    assert_eq!(spec.ports.first().map(|port| port.guest), NonZeroU16::new(80));
}
