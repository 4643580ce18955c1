use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use super::*;

fn password(user: &str, password: &str) -> Credentials {
    Credentials::Password { user: user.into(), password: Secret::new(password.into()) }
}

async fn find_in(config: &str, key: &str) -> Result<Credentials, Error> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    fs::write(&path, config).unwrap();
    find(Some(&path), key).await
}

#[tokio::test]
async fn entries_are_found_however_their_host_is_written() {
    let auth = STANDARD.encode("me:se:cret");
    let config = format!(
        r#"{{"auths":{{"https://a.example/v1/":{{"auth":"{auth}"}},"b.example:5000":{{"username":"u","password":"p"}},
        "c.example":{{"identitytoken":"id"}},"d.example":{{"registrytoken":"rt"}},"e.example":{{}}}},"other":1}}"#
    );
    for (key, expected) in [
        ("a.example", password("me", "se:cret")),
        ("b.example:5000", password("u", "p")),
        ("b.example", Credentials::Anonymous),
        ("c.example", Credentials::Identity(Secret::new("id".into()))),
        ("d.example", Credentials::RegistryToken(Secret::new("rt".into()))),
        ("e.example", Credentials::Anonymous),
        ("f.example", Credentials::Anonymous),
    ] {
        assert_eq!(find_in(&config, key).await.unwrap(), expected, "{key}");
    }
}

#[tokio::test]
async fn no_file_is_anonymous_and_a_damaged_one_is_an_error() {
    assert_eq!(find(None, "a").await.unwrap(), Credentials::Anonymous);
    assert_eq!(find(Some(Path::new("/nowhere/config.json")), "a").await.unwrap(), Credentials::Anonymous);
    assert!(matches!(find_in("{", "a").await, Err(Error::Json { .. })));
    let bad = find_in(r#"{"auths":{"a.example":{"auth":"%%%"}}}"#, "a.example").await;
    assert!(matches!(bad, Err(Error::Entry { .. })));
}

#[tokio::test]
async fn a_helper_that_is_missing_or_misnamed_is_an_error_that_names_it() {
    let missing = find_in(r#"{"credsStore":"imp-test-missing"}"#, "a.example").await.unwrap_err();
    assert!(missing.to_string().contains("docker-credential-imp-test-missing"), "{missing}");
    let misnamed = find_in(r#"{"credHelpers":{"a.example":"../x"}}"#, "a.example").await;
    assert!(matches!(misnamed, Err(Error::HelperName(_))));
}

/// A name that makes the helper's path relative to nothing but PATH cannot be tested without changing the environment of
/// this process, so the scripts go where PATH already leads: a subprocess of this test with its own PATH.
#[test]
fn helpers_answer_for_the_hosts_they_are_named_for() {
    let directory = tempfile::tempdir().unwrap();
    let script = |name: &str, body: &str| {
        let path = directory.path().join(format!("docker-credential-{name}"));
        fs::write(&path, format!("#!/bin/sh\nread host\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    script("good", r#"echo "{\"ServerURL\":\"$host\",\"Username\":\"at-$host\",\"Secret\":\"s\"}""#);
    script("token", r#"echo '{"ServerURL":"x","Username":"<token>","Secret":"t"}'"#);
    script("empty", "echo 'credentials not found in native keychain'; exit 1");
    script("broken", "exit 3");
    fs::write(
        directory.path().join("config.json"),
        r#"{"credsStore":"good","credHelpers":{"t.example":"token","e.example":"empty","b.example":"broken"},
        "auths":{"e.example":{"username":"u","password":"p"}}}"#,
    )
    .unwrap();
    let path = std::env::join_paths([directory.path(), Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "image::registry::credentials::tests::with_helpers_on_the_path", "--ignored"])
        .env("PATH", path)
        .env("HELPERS_CONFIG", directory.path().join("config.json"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

#[tokio::test]
#[ignore = "run by the test above, in a process with its own PATH"]
async fn with_helpers_on_the_path() {
    let config = PathBuf::from(std::env::var_os("HELPERS_CONFIG").unwrap());
    let found = async |key: &str| find(Some(&config), key).await;
    assert_eq!(found("a.example").await.unwrap(), password("at-a.example", "s"));
    assert_eq!(found("t.example").await.unwrap(), Credentials::Identity(Secret::new("t".into())));
    assert_eq!(found("e.example").await.unwrap(), password("u", "p"));
    assert!(matches!(found("b.example").await, Err(Error::HelperFailed { .. })));
}

#[test]
fn a_secret_is_not_shown() {
    assert_eq!(format!("{:?}", password("u", "hunter2")).find("hunter2"), None);
}
