//! `imp image`: images of this machine, listed for people and for scripts.

use imp_testkit::imp::Imp;

#[test]
fn an_imported_image_is_listed_inspected_and_removed() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
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
    let imp = Imp::with_busybox()?;
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
