//! `imp image pull` takes images from a registry as a user has it: names, credentials, plain HTTP by name, progress.

use std::fs;

use imp_testkit::images;
use imp_testkit::imp::{Imp, finish, wait_until};
use imp_testkit::registry::{FaultProxy, Reaction, Registry};
use imp_testkit::small_disk::SmallDisk;
use imp_testkit::terminal;

use crate::DRIVER;

struct Fixture {
    imp: Imp,
    registry: Registry,
}

impl Fixture {
    fn new() -> anyhow::Result<Self> {
        let registry = Registry::start()?;
        registry.push_as(&images::busybox()?, images::BUSYBOX, "app:latest")?;
        Ok(Self { imp: Imp::new(DRIVER)?, registry })
    }

    /// The name of the image at this host, which is named as insecure in the settings.
    fn at(&self, host: &str) -> anyhow::Result<String> {
        fs::write(self.imp.settings(), format!("[registries]\ninsecure = [\"{host}\"]\n"))?;
        Ok(format!("{host}/app:latest"))
    }
}

#[test]
fn an_image_is_pulled_once_and_a_log_says_what_was_done() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    let (imp, name) = (&fixture.imp, fixture.at(fixture.registry.address())?);
    let came = imp.run(["image", "pull", &name])?;
    assert!(came.stdout.starts_with("sha256:") && came.stdout.lines().count() == 1, "{}", came.stdout);
    for said in ["looking it up", "1 layers", "downloaded", "disk built"] {
        assert!(came.stderr.contains(said), "{said}: {}", came.stderr);
    }
    assert!(!came.stderr.contains('\x1b') && !came.stderr.contains('\r'), "{:?}", came.stderr);
    let again = imp.run(["image", "pull", &name])?;
    assert!(
        again.stderr.contains("already there") && !again.stderr.contains("downloaded"),
        "{}",
        again.stderr
    );
    let quiet = imp.run(["image", "pull", "--quiet", &name])?;
    assert_eq!((quiet.stdout, quiet.stderr.as_str()), (came.stdout, ""));
    assert_eq!(imp.run(["image", "ls", "-o", "name"])?.good()?, format!("{name}\n"));
    fixture.imp.end()
}

#[test]
fn a_terminal_shows_bars() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    let proxy = FaultProxy::start(fixture.registry.address(), |request| {
        // A bar that is never in the way long enough to be drawn proves nothing.
        if request.is_blob() && request.header("range").is_none() {
            Reaction::Cut { after: 300_000 }
        } else {
            Reaction::Forward
        }
    })?;
    let name = fixture.at(proxy.address())?;
    let child = terminal::command(&fixture.imp.command(["image", "pull", &name]))?.spawn()?;
    let came = finish(child)?;
    assert_eq!(came.code, Some(0), "{}", came.stdout);
    assert!(came.stdout.contains("downloading") && came.stdout.contains("\x1b["), "{:?}", came.stdout);
    fixture.imp.end()
}

#[test]
fn plain_http_is_only_spoken_where_the_user_says_so() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    let name = format!("{}/app:latest", fixture.registry.address());
    let came = fixture.imp.run(["image", "pull", &name])?;
    assert_eq!(came.code, Some(1));
    assert!(
        came.stderr.contains("does not speak TLS") && came.stderr.contains("insecure"),
        "{}",
        came.stderr
    );
    let mut command = fixture.imp.command(["image", "pull", &name]);
    let child = command.env("IMP_INSECURE_REGISTRIES", fixture.registry.address()).spawn()?;
    finish(child)?.good()?;
    fixture.imp.end()
}

#[test]
fn credentials_come_from_dockers_configuration() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    // user:secret
    let proxy = FaultProxy::start(fixture.registry.address(), |request| {
        if request.header("authorization") == Some("Basic dXNlcjpzZWNyZXQ=") {
            Reaction::Forward
        } else {
            Reaction::status(401, &[("www-authenticate", "Basic realm=\"tests\"")], "")
        }
    })?;
    let name = fixture.at(proxy.address())?;
    let came = fixture.imp.run(["image", "pull", &name])?;
    assert_eq!(came.code, Some(1));
    assert!(came.stderr.contains("docker login"), "{}", came.stderr);
    fs::create_dir(fixture.imp.docker())?;
    let login = format!(r#"{{"auths":{{"{}":{{"auth":"dXNlcjpzZWNyZXQ="}}}}}}"#, proxy.address());
    fs::write(fixture.imp.docker().join("config.json"), login)?;
    fixture.imp.run(["image", "pull", &name])?.good()?;
    fixture.imp.end()
}

#[test]
fn a_policy_decides_whether_the_registry_is_asked() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    let proxy = FaultProxy::start(fixture.registry.address(), |_| Reaction::Forward)?;
    let name = fixture.at(proxy.address())?;
    // Nothing is booted: the kernel that is asked for does not exist, and is looked for after the image.
    let run = |policy: &str| {
        fixture.imp.run([
            "run",
            "--pull",
            policy,
            "--kernel",
            "/no/kernel",
            "--network",
            "none",
            &name,
            "true",
        ])
    };
    let came = run("never")?;
    assert!(came.code == Some(125) && came.stderr.contains("imp image pull"), "{}", came.stderr);
    assert_eq!(proxy.requests().len(), 0);
    run("missing")?;
    let once = proxy.requests().len();
    assert!(once > 0);
    run("missing")?;
    run("never")?;
    assert_eq!(proxy.requests().len(), once);
    run("always")?;
    assert!(proxy.requests().len() > once);
    assert_eq!(fixture.imp.run(["image", "ls", "-o", "name"])?.good()?, format!("{name}\n"));
    fixture.imp.end()
}

#[test]
fn a_registry_that_cannot_be_reached_is_named_with_what_to_check() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    fs::write(imp.settings(), "[registries]\nattempts = 1\ninsecure = [\"127.0.0.1:1\"]\n")?;
    let came = imp.run(["image", "pull", "127.0.0.1:1/app"])?;
    assert_eq!(came.code, Some(1));
    assert!(
        came.stderr.contains("cannot reach 127.0.0.1:1") && came.stderr.contains("check the name"),
        "{}",
        came.stderr
    );
    imp.end()
}

#[test]
fn an_image_that_the_registry_does_not_have_is_said_to_be_missing() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    let name = fixture.at(fixture.registry.address())?.replace("app", "nothing");
    let came = fixture.imp.run(["image", "pull", &name])?;
    assert!(came.code == Some(1) && came.stderr.contains("nothing"), "{}", came.stderr);
    assert!(!came.stderr.contains("try 2"), "{}", came.stderr);
    fixture.imp.end()
}

#[test]
fn a_pull_that_is_killed_leaves_a_store_in_which_the_next_one_works() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    let proxy = FaultProxy::start(fixture.registry.address(), |request| {
        if request.is_blob() && request.header("range").is_none() {
            Reaction::Stall { after: 100_000 }
        } else {
            Reaction::Forward
        }
    })?;
    let name = fixture.at(proxy.address())?;
    let mut child = fixture.imp.command(["image", "pull", &name]).spawn()?;
    let partial = fixture.imp.data().join("images/partial");
    wait_until("bytes have arrived", || {
        let files = fs::read_dir(&partial).into_iter().flatten().flatten();
        Ok(files.filter_map(|file| file.metadata().ok()).any(|file| file.len() > 50_000))
    })?;
    child.kill()?;
    child.wait()?;
    let name = fixture.at(fixture.registry.address())?;
    fixture.imp.run(["image", "pull", &name])?.good()?;
    fixture.imp.run(["image", "rm", &name])?.good()?;
    fixture.imp.run(["image", "prune", "--all"])?.good()?;
    for folder in ["blobs/sha256", "images", "names", "disks", "leases"] {
        let left = fs::read_dir(fixture.imp.data().join("images").join(folder))?.count();
        assert_eq!(left, 0, "{folder}");
    }
    fixture.imp.end()
}

#[test]
fn a_disk_that_is_full_is_said_to_be_and_stops_nothing_for_good() -> anyhow::Result<()> {
    let fixture = Fixture::new()?;
    let name = fixture.at(fixture.registry.address())?;
    let images = fixture.imp.data().join("images");
    fs::create_dir_all(&images)?;
    let mount = SmallDisk::mount(&images, "700k")?;
    let came = fixture.imp.run(["image", "pull", &name])?;
    assert_eq!(came.code, Some(1), "{}", came.stderr);
    assert!(came.stderr.contains("is full; free space there"), "{}", came.stderr);
    assert_eq!(fixture.imp.run(["image", "ls", "-o", "name"])?.good()?, "");
    mount.resize("50m")?;
    fixture.imp.run(["image", "pull", &name])?.good()?;
    drop(mount);
    fixture.imp.end()
}
