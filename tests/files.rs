//! `imp cp` copies as docker does, in both directions, and never beyond the destination.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use imp_testkit::imp::{Imp, finish};

fn with_vm() -> anyhow::Result<Imp> {
    let imp = Imp::with_busybox()?;
    imp.run(["run", "-d", "--name", "vm", "--network", "none", "imp.test/busybox", "sleep", "1000"])?
        .good()?;
    Ok(imp)
}

fn sh(imp: &Imp, script: &str) -> anyhow::Result<String> {
    imp.run(["exec", "vm", "sh", "-c", script])?.good()
}

#[test]
fn a_tree_goes_in_and_comes_out_the_same() -> anyhow::Result<()> {
    let imp = with_vm()?;
    let tree = imp.folder().join("tree");
    fs::create_dir_all(tree.join("sub"))?;
    fs::write(tree.join("sub/file"), vec![7; 3_000_000])?;
    fs::set_permissions(tree.join("sub/file"), fs::Permissions::from_mode(0o640))?;
    symlink("/nowhere", tree.join("link"))?;
    imp.run(["cp", "tree", "vm:/srv/copy"])?.good()?;
    let seen = sh(&imp, "stat -c '%a %u %s' /srv/copy/sub/file; readlink /srv/copy/link")?;
    assert_eq!(seen, "640 0 3000000\n/nowhere\n");
    // Into a directory that exists, and its contents only.
    imp.run(["cp", "tree", "vm:/srv/copy"])?.good()?;
    imp.run(["cp", "tree/.", "vm:/tmp"])?.good()?;
    assert_eq!(sh(&imp, "ls -d /srv/copy/tree/sub /tmp/sub")?, "/srv/copy/tree/sub\n/tmp/sub\n");
    imp.run(["cp", "vm:/tmp/sub", "back"])?.good()?;
    let back = imp.folder().join("back/file");
    assert_eq!(fs::read(&back)?, vec![7; 3_000_000]);
    assert_eq!(fs::metadata(&back)?.mode() & 0o777, 0o640);
    imp.end()
}

#[test]
fn a_file_gets_the_name_of_the_destination_or_goes_into_it() -> anyhow::Result<()> {
    let imp = with_vm()?;
    fs::write(imp.folder().join("file"), "x")?;
    imp.run(["cp", "file", "vm:/tmp/renamed"])?.good()?;
    imp.run(["cp", "file", "vm:/srv"])?.good()?;
    assert_eq!(sh(&imp, "cat /tmp/renamed /srv/file")?, "xx");
    imp.run(["cp", "vm:/etc/passwd", "users"])?.good()?;
    assert!(fs::read_to_string(imp.folder().join("users"))?.starts_with("root:"));
    let came = imp.run(["cp", "file", "vm:/no/such/parent"])?;
    assert!(came.code == Some(1) && came.stderr.contains("/no/such does not exist"), "{}", came.stderr);
    let came = imp.run(["cp", "vm:/no/such", "here"])?;
    assert!(came.code == Some(1) && came.stderr.contains("/no/such does not exist"), "{}", came.stderr);
    imp.end()
}

#[test]
fn a_stream_comes_out_and_goes_in() -> anyhow::Result<()> {
    let imp = with_vm()?;
    sh(&imp, "mkdir /tmp/d && echo one > /tmp/d/a")?;
    let archive = imp.folder().join("archive.tar");
    let child = imp.command(["cp", "vm:/tmp/d", "-"]).stdout(fs::File::create(&archive)?).spawn()?;
    assert_eq!(finish(child)?.code, Some(0));
    let child = imp.command(["cp", "-", "vm:/srv"]).stdin(fs::File::open(&archive)?).spawn()?;
    assert_eq!(finish(child)?.code, Some(0));
    assert_eq!(sh(&imp, "cat /srv/a")?, "one\n");
    imp.end()
}
