//! `imp image`: images of this machine, listed for people and for scripts.

use std::fs;

use imp_testkit::images;
use imp_testkit::imp::Imp;

use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

#[test]
fn an_imported_image_is_listed_inspected_and_removed() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    assert_eq!(imp.run(["image", "ls", "-o", "name"])?.good()?, "imp.test/busybox:latest\n");
    let listed: serde_json::Value = serde_json::from_str(&imp.run(["image", "ls", "-o", "json"])?.good()?)?;
    assert!(listed.pointer("/0/disk_size").and_then(|size| size.as_u64()) > Some(0), "{listed}");
    let inspected: serde_json::Value =
        serde_json::from_str(&imp.run(["image", "inspect", "imp.test/busybox"])?.good()?)?;
    assert_eq!(inspected.pointer("/0/config/cmd/0").and_then(|word| word.as_str()), Some("sh"));
    let digest = inspected.pointer("/0/digest").and_then(|digest| digest.as_str()).unwrap_or_default();
    assert_eq!(imp.run(["image", "inspect", digest])?.code, Some(0));
    let ids = imp.run(["image", "ls", "-q"])?.good()?;
    assert_eq!(ids, format!("{digest}\n"));
    imp.run(["image", "rm", ids.trim()])?.good()?;
    assert_eq!(imp.run(["image", "ls", "-o", "name"])?.good()?, "");
    let came = imp.run(["image", "inspect", "imp.test/busybox"])?;
    assert_eq!(came.code, Some(1));
    imp.end()
}

#[test]
fn an_image_that_a_vm_uses_stays() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let line = ["run", "-d", "--name", "vm", "--network", "none", "imp.test/busybox", "sleep", "1000"];
    imp.run(line)?.good()?;
    imp.run(["image", "prune", "--all"])?.good()?;
    assert_eq!(imp.run(["image", "ls", "-o", "name"])?.good()?, "imp.test/busybox:latest\n");
    let came = imp.run(["image", "rm", "imp.test/busybox"])?;
    assert_eq!(came.code, Some(1), "{}", came.stdout);
    assert!(came.stderr.contains("imp rm -f vm"), "{}", came.stderr);
    imp.run(["rm", "-f", "vm"])?.good()?;
    imp.run(["prune", "--all"])?.good()?;
    assert_eq!(imp.run(["image", "ls", "-o", "name"])?.good()?, "");
    imp.end()
}

#[test]
fn an_import_or_a_removal_that_is_killed_at_any_point_leaves_a_store_that_works() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    let source = format!("oci:{}", images::busybox()?.display());
    let images = imp.data().join("images");
    for steps in 0..12 {
        let mut child = imp.command(["image", "import", &source]).spawn()?;
        // As many looks at the file system as make the kill land later from round to round.
        for _ in 0..steps * 40 {
            let _ = fs::read_dir(images.join("disks")).map(Iterator::count);
        }
        child.kill()?;
        child.wait()?;
        imp.run(["image", "ls"])?.good()?;
    }
    for steps in 0..12 {
        imp.run(["image", "import", &source])?.good()?;
        let verb: &[&str] = if steps % 2 == 0 { &["prune", "--all"] } else { &["rm", IMAGE] };
        let mut child = imp.command(["image"].iter().chain(verb)).spawn()?;
        for _ in 0..steps * 10 {
            let _ = fs::read_dir(images.join("disks")).map(Iterator::count);
        }
        child.kill()?;
        child.wait()?;
    }
    imp.run(["image", "import", &source])?.good()?;
    assert_eq!(imp.run(["image", "ls", "-o", "name"])?.good()?, "imp.test/busybox:latest\n");
    // What was imported last works: no half of it was taken for the whole.
    imp.run(["image", "inspect", IMAGE])?.good()?;
    imp.run(["image", "prune", "--all"])?.good()?;
    for folder in ["blobs/sha256", "images", "names", "disks", "partial", "leases"] {
        assert_eq!(fs::read_dir(images.join(folder))?.count(), 0, "{folder}");
    }
    imp.end()
}
