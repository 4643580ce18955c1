//! A template that one machine has made is carried to another, where VMs start from it, or it is refused with the reason.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use imp_testkit::images;
use imp_testkit::imp::{Came, Imp, finish};
use imp_testkit::machine::program;
use imp_testkit::registry::Registry;
use imp_testkit::small_disk::SmallDisk;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::promises::driver::on_driver;
use super::templates::{build, json};
use crate::DRIVER;

/// Whether a VM of the template goes on from where it was ready.
fn starts(imp: &Imp, template: &str) -> anyhow::Result<()> {
    imp.run(["run", "-d", "--template", template, "--name", "vm"])?.good()?;
    let said = imp.run(["exec", "vm", "cat", "/prepared", "/said"])?.good()?;
    ensure!(said == "one\nready\n", "{said}");
    imp.run(["rm", "-f", "vm"])?.good().map(drop)
}

fn export(imp: &Imp, template: &str) -> anyhow::Result<PathBuf> {
    let layout = imp.folder().join("layout");
    imp.run(["template", "export", "-q", template, &format!("oci:{}", layout.display())])?.good()?;
    Ok(layout)
}

fn import(imp: &Imp, layout: &Path) -> anyhow::Result<Came> {
    imp.run(["template", "import", "--pull", "never", "brought", &format!("oci:{}", layout.display())])
}

fn refused(came: &Came, why: &[&str]) -> anyhow::Result<()> {
    ensure!(came.code == Some(1), "{came:?}");
    for part in why {
        ensure!(came.stderr.contains(part), "{part}: {}", came.stderr);
    }
    ensure!(came.stderr.lines().filter(|line| line.starts_with("error: ")).count() == 1, "{}", came.stderr);
    Ok(())
}

/// Neither a template nor a part of one.
fn has_nothing(imp: &Imp) -> anyhow::Result<()> {
    let images = imp.data().join("images");
    for directory in ["snapshots", "templates", "drafts", "arriving", "leases"] {
        let left: Vec<_> = fs::read_dir(images.join(directory))?.flatten().map(|it| it.path()).collect();
        ensure!(left.is_empty(), "{left:?}");
    }
    Ok(())
}

#[test]
fn a_template_from_another_machine_starts_here_once_its_image_is_here() -> anyhow::Result<()> {
    on_driver(|| {
        let (there, here) = (Imp::with_busybox(DRIVER)?, Imp::new(DRIVER)?);
        let digest = build(&there, "ready")?;
        let layout = export(&there, "ready")?;
        let came = import(&here, &layout)?;
        refused(&came, &["is not on this machine", "imp image pull imp.test/busybox@sha256:"])?;
        has_nothing(&here)?;
        here.run(["image", "import", &format!("oci:{}", images::busybox()?.display())])?.good()?;
        assert_eq!(import(&here, &layout)?.good()?, format!("{digest}\n"));
        starts(&here, "brought")?;
        // Nothing of the other machine's directories is in it.
        let manifest = here.data().join("images/snapshots").join(digest.trim_start_matches("sha256:"));
        let manifest = fs::read_to_string(manifest.join("manifest.json"))?;
        assert!(!manifest.contains(there.folder().to_str().context("a path")?), "{manifest}");
        // It is nobody's word for what was built, and stays although nothing was.
        here.run(["image", "prune"])?.good()?;
        here.run(["template", "prune"])?.good()?;
        assert_eq!(json(&here, &["template", "ls", "-o", "json"])?.pointer("/0/made_of"), Some(&Value::Null));
        let archive = format!("oci-archive:{}", here.folder().join("template.tar").display());
        here.run(["template", "export", "-q", "brought", &archive])?.good()?;
        here.run(["template", "rm", "brought"])?.good()?;
        here.run(["template", "import", "-q", "again", &archive])?.good()?;
        starts(&here, "again")?;
        assert_eq!(here.run(["template", "prune", "-a"])?.good()?, format!("removed template {digest}\n"));
        has_nothing(&here)?;
        there.end()?;
        here.end()
    })
}

#[test]
fn a_template_goes_through_a_registry_and_its_image_comes_with_it() -> anyhow::Result<()> {
    on_driver(|| {
        let registry = Registry::start()?;
        registry.push_as(&images::busybox()?, images::BUSYBOX, "app:latest")?;
        let (there, here) = (Imp::new(DRIVER)?, Imp::new(DRIVER)?);
        for imp in [&there, &here] {
            fs::write(imp.settings(), format!("[registries]\ninsecure = [\"{}\"]\n", registry.address()))?;
        }
        let image = format!("{}/app:latest", registry.address());
        let line =
            ["template", "build", "-q", "--network", "none", "-m", "128m", "--init", "echo one >/prepared"];
        let program = ["ready", &image, "--", "sh", "-c", "echo ready >/said; exec sleep 100000"];
        let ready = ["--wait-command", "test -e /said"];
        let digest = there.run(line.iter().chain(&ready).chain(&program))?.good()?;
        let name = format!("{}/templates/ready:1", registry.address());
        let artifact = there.run(["template", "push", "-q", "ready", &name])?.good()?;
        assert_eq!(there.run(["template", "push", "-q", "ready", &name])?.good()?, artifact);
        assert_eq!(here.run(["template", "pull", "-q", "ready", &name])?.good()?, digest);
        starts(&here, "ready")?;
        let again = here.run(["template", "pull", "also", &name])?;
        assert_eq!(again.stdout, digest);
        assert!(again.stderr.contains("it is there already"), "{}", again.stderr);
        there.end()?;
        here.end()
    })
}

/// An authority and two machines that it knows.
fn certify(folder: &Path) -> anyhow::Result<()> {
    let openssl = |words: &[&str]| -> anyhow::Result<()> {
        let key = ["-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"];
        let output = Command::new(program("openssl")?)
            .current_dir(folder)
            .args(["req", "-x509"])
            .args(words)
            .args(key)
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    openssl(&["-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem"])?;
    for name in ["server", "client", "stranger"] {
        let (key, certificate) = (format!("{name}.key"), format!("{name}.pem"));
        let names = format!("subjectAltName=DNS:{name}.example");
        let own = ["-subj", "/CN=machine", "-keyout", &key, "-out", &certificate, "-addext", &names];
        let of = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"];
        openssl(&[&own[..], &of].concat())?;
    }
    Ok(())
}

fn shown_by(folder: &Path, name: &str) -> Vec<String> {
    let file = |name: String| folder.join(name).display().to_string();
    let flags = ["--certificate", "--key", "--authorities"];
    let files = [file(format!("{name}.pem")), file(format!("{name}.key")), file("ca.pem".to_owned())];
    flags.iter().zip(files).flat_map(|(flag, file)| [(*flag).to_owned(), file]).collect()
}

/// A machine that serves its template, and its address.
fn serve(imp: &Imp, folder: &Path) -> anyhow::Result<(Child, String)> {
    let line = ["template", "serve", "ready", "--listen", "127.0.0.1:0", "--allow", "client.example"];
    let line = line.map(str::to_owned).into_iter().chain(shown_by(folder, "server"));
    let mut serving = imp.command(line).spawn()?;
    let mut address = String::new();
    BufReader::new(serving.stdout.as_mut().context("no output")?).read_line(&mut address)?;
    Ok((serving, address.trim().to_owned()))
}

#[test]
fn a_template_is_pulled_from_a_machine_that_serves_it_and_a_pull_that_was_killed_goes_on()
-> anyhow::Result<()> {
    on_driver(|| {
        let (there, here) = (Imp::with_busybox(DRIVER)?, Imp::with_busybox(DRIVER)?);
        let digest = build(&there, "ready")?;
        let folder = there.folder().join("certificates");
        fs::create_dir(&folder)?;
        certify(&folder)?;
        let (mut serving, address) = serve(&there, &folder)?;
        let pull = |name: &str| {
            let line = ["template", "pull", "--peer", &address, "--peer-name", "server.example"];
            let line = line.map(str::to_owned).into_iter().chain(shown_by(&folder, name));
            line.chain(["brought".to_owned(), digest.clone()]).collect::<Vec<_>>()
        };
        refused(&here.run(pull("stranger"))?, &["does not serve this machine"])?;
        has_nothing(&here)?;
        // Killed when some of it has arrived, and then at once.
        let part = here.data().join("images/arriving").join(digest.trim_start_matches("sha256:"));
        let killed = here.command(pull("client")).spawn()?;
        let pid = i32::try_from(killed.id()).ok().and_then(Pid::from_raw).context("no pid")?;
        // Looked for all the time: the whole of it takes a moment.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !fs::metadata(part.join("memory")).is_ok_and(|memory| memory.blocks() * 512 > 1 << 20) {
            ensure!(Instant::now() < deadline, "nothing has arrived");
            std::thread::yield_now();
        }
        kill_process(pid, Signal::KILL)?;
        assert_eq!(finish(killed)?.code, None);
        assert_eq!(here.run(["template", "ls", "-q"])?.good()?, "");
        let came = here.run(pull("client"))?;
        assert_eq!(came.stdout, format!("{digest}\n"), "{}", came.stderr);
        assert!(came.stderr.contains("there before"), "{}", came.stderr);
        starts(&here, "brought")?;
        let server = i32::try_from(serving.id()).ok().and_then(Pid::from_raw).context("no pid")?;
        kill_process(server, Signal::INT)?;
        assert_eq!(serving.wait()?.code(), Some(0));
        refused(&here.run(pull("client"))?, &["server.example"])?;
        here.run(["template", "rm", "brought"])?.good()?;
        has_nothing(&here)?;
        there.end()?;
        here.end()
    })
}

fn sha256(path: &Path) -> anyhow::Result<String> {
    let output = Command::new(program("sha256sum")?).arg(path).output()?;
    Ok(String::from_utf8(output.stdout)?.split(' ').next().context("no digest")?.to_owned())
}

/// A copy of a layout whose documents say something else, with all digests made right again.
fn changed(layout: &Path, change: impl FnOnce(&mut Value)) -> anyhow::Result<PathBuf> {
    let copy = layout.with_extension("changed");
    let _ = fs::remove_dir_all(&copy);
    ensure!(Command::new("cp").arg("-r").arg(layout).arg(&copy).status()?.success());
    let read =
        |name: &str| -> anyhow::Result<Value> { Ok(serde_json::from_slice(&fs::read(copy.join(name))?)?) };
    let blob = |digest: &Value| -> anyhow::Result<String> {
        Ok(format!("blobs/sha256/{}", digest.as_str().context("no digest")?.trim_start_matches("sha256:")))
    };
    let put = |document: &Value, entry: &mut Value| -> anyhow::Result<()> {
        let new = copy.join("blobs/sha256/new");
        fs::write(&new, document.to_string())?;
        let digest = sha256(&new)?;
        *entry.get_mut("size").context("no size")? = fs::metadata(&new)?.len().into();
        *entry.get_mut("digest").context("no digest")? = format!("sha256:{digest}").into();
        Ok(fs::rename(&new, copy.join("blobs/sha256").join(digest))?)
    };
    let mut index = read("index.json")?;
    let entry = index.pointer_mut("/manifests/0").context("no entry")?;
    let mut oci = read(&blob(entry.get("digest").context("no digest")?)?)?;
    let config = oci.get_mut("config").context("no config")?;
    let mut manifest = read(&blob(config.get("digest").context("no digest")?)?)?;
    change(&mut manifest);
    put(&manifest, config)?;
    put(&oci, entry)?;
    fs::write(copy.join("index.json"), index.to_string())?;
    Ok(copy)
}

#[test]
fn what_another_machine_made_differently_is_refused_with_the_difference() -> anyhow::Result<()> {
    on_driver(|| {
        let (there, here) = (Imp::with_busybox(DRIVER)?, Imp::with_busybox(DRIVER)?);
        build(&there, "ready")?;
        let layout = export(&there, "ready")?;
        let other = format!("sha256:{}", "5".repeat(64));
        type Case<'a> = (&'a str, Value, &'a [&'a str]);
        let cases: [Case<'_>; 9] = [
            ("/snapshot/vmm/version", "0.1".into(), &["was made by qemu 0.1, here is qemu"]),
            ("/snapshot/vmm/name", "other".into(), &["other", "does not run VMs here"]),
            ("/snapshot/cpu/features", other.clone().into(), &["with the features 555555555555"]),
            ("/snapshot/kernel", other.clone().into(), &["555555555555", "not installed here"]),
            ("/format", 2.into(), &["format 2", "knows 1"]),
            ("/snapshot/kind", "suspend".into(), &["no template"]),
            ("/snapshot/devices/cpus", 7.into(), &["contradicts itself"]),
            ("/snapshot/base", other.clone().into(), &["makes another disk", "build it here"]),
            ("/snapshot/configuration/spec", Value::Null, &["does not say what is in it"]),
        ];
        for (place, value, why) in cases {
            let layout = changed(&layout, |manifest| {
                if let Some(field) = manifest.pointer_mut(place) {
                    *field = value;
                }
            })?;
            refused(&import(&here, &layout)?, why).with_context(|| place.to_owned())?;
            has_nothing(&here).with_context(|| place.to_owned())?;
        }
        import(&here, &layout)?.good()?;
        starts(&here, "brought")?;
        there.end()?;
        here.end()
    })
}

/// The largest chunk of a layout, compressed, and another one.
fn chunks(layout: &Path) -> anyhow::Result<[PathBuf; 2]> {
    let mut blobs: Vec<PathBuf> =
        fs::read_dir(layout.join("blobs/sha256"))?.map(|it| Ok(it?.path())).collect::<anyhow::Result<_>>()?;
    blobs.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).map(|it| it.len()).unwrap_or_default()));
    let mut blobs = blobs.into_iter();
    Ok([blobs.next().context("no chunk")?, blobs.next().context("one chunk")?])
}

#[test]
fn what_was_damaged_on_its_way_or_here_is_found_and_never_run() -> anyhow::Result<()> {
    on_driver(|| {
        let (there, here) = (Imp::with_busybox(DRIVER)?, Imp::with_busybox(DRIVER)?);
        let digest = build(&there, "ready")?;
        let layout = export(&there, "ready")?;
        let [one, other] = chunks(&layout)?;
        let aside = layout.join("aside");
        let damages: [(&str, &dyn Fn() -> anyhow::Result<()>); 4] = [
            ("flipped", &|| {
                let mut bytes = fs::read(&aside)?;
                let middle = bytes.len() / 2;
                *bytes.get_mut(middle).context("empty")? ^= 1;
                Ok(fs::write(&one, bytes)?)
            }),
            ("truncated", &|| Ok(fs::File::options().write(true).open(&one)?.set_len(1000)?)),
            ("swapped", &|| Ok(fs::copy(&other, &one).map(drop)?)),
            ("missing", &|| Ok(fs::remove_file(&one)?)),
        ];
        fs::copy(&one, &aside)?;
        for (how, damage) in damages {
            damage()?;
            let came = import(&here, &layout)?;
            refused(&came, &["layout"]).with_context(|| how.to_owned())?;
            assert_eq!(here.run(["template", "ls", "-q"])?.good()?, "", "{how}");
            fs::copy(&aside, &one)?;
        }
        // With what had arrived before the damage it goes on.
        let came = import(&here, &layout)?;
        assert!(came.code == Some(0) && came.stderr.contains("there before"), "{came:?}");
        // And what rots here is not run, while others go on.
        here.run(["run", "-d", "--template", "brought", "--name", "lives"])?.good()?;
        let memory =
            here.data().join("images/snapshots").join(digest.trim_start_matches("sha256:")).join("memory");
        let copy = memory.with_extension("copy");
        fs::copy(&memory, &copy)?;
        let file = fs::File::options().write(true).open(&copy)?;
        // Where something is: what is not zero is what leaves.
        let at = fs::read(&memory)?.iter().position(|byte| *byte != 0).context("no memory")?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[0], at as u64)?;
        fs::rename(&copy, &memory)?;
        refused(&here.run(["template", "verify", "brought"])?, &["memory is damaged"])?;
        let came = here.run(["run", "-d", "--template", "brought"])?;
        assert!(came.code == Some(125) && came.stderr.contains("memory is damaged"), "{came:?}");
        let came = here.run(["template", "export", "-q", "brought", "oci:elsewhere"])?;
        refused(&came, &["damaged"])?;
        assert!(!here.folder().join("elsewhere/index.json").exists());
        assert_eq!(here.run(["exec", "lives", "cat", "/said"])?.good()?, "ready\n");
        here.run(["rm", "-f", "lives"])?.good()?;
        there.end()?;
        here.end()
    })
}

#[test]
fn a_full_disk_refuses_a_template_early_and_keeps_nothing_half_written() -> anyhow::Result<()> {
    on_driver(|| {
        let (there, here) = (Imp::with_busybox(DRIVER)?, Imp::new(DRIVER)?);
        build(&there, "ready")?;
        let layout = export(&there, "ready")?;
        let images = here.data().join("images");
        fs::create_dir_all(&images)?;
        let disk = SmallDisk::mount(&images, "24m")?;
        here.run(["image", "import", &format!("oci:{}", images::busybox()?.display())])?.good()?;
        refused(&import(&here, &layout)?, &["not enough disk space", "MiB are free", "imp prune"])?;
        has_nothing(&here)?;
        disk.resize("400m")?;
        import(&here, &layout)?.good()?;
        // No room for an archive: what is written of it goes.
        let target = here.folder().join("small");
        fs::create_dir(&target)?;
        let small = SmallDisk::mount(&target, "1m")?;
        for archive in ["oci-archive:small/template.tar", "oci:small/layout"] {
            refused(&here.run(["template", "export", "-q", "brought", archive])?, &["is full"])?;
        }
        assert!(!target.join("template.tar").exists() && !target.join("layout/index.json").exists());
        drop(small);
        starts(&here, "brought")?;
        there.end()?;
        here.run(["owner", "stop"])?.good()?;
        drop(disk);
        here.end()
    })
}
