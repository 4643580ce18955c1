//! `imp cp` copies as docker does, in both directions, and never beyond the destination.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use anyhow::Context as _;
use imp_testkit::imp::{Imp, SharedVm, finish, wait_until};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use super::driver::on_driver;
use crate::DRIVER;

fn sh(imp: &Imp, script: &str) -> anyhow::Result<String> {
    imp.run(["exec", "vm", "sh", "-c", script])?.good()
}

#[test]
fn a_tree_goes_in_and_comes_out_the_same() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let tree = imp.folder().join("tree");
        fs::create_dir_all(tree.join("sub"))?;
        fs::write(tree.join("sub/file"), vec![7; 3_000_000])?;
        fs::set_permissions(tree.join("sub/file"), fs::Permissions::from_mode(0o640))?;
        symlink("/nowhere", tree.join("link"))?;
        // Two seconds before 1970.
        let old = Timespec { tv_sec: -2, tv_nsec: 0 };
        let old = Timestamps { last_access: old, last_modification: old };
        for name in ["sub/file", "link"] {
            utimensat(CWD, tree.join(name), &old, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        imp.run(["cp", "tree", "vm:/srv/copy"])?.good()?;
        assert_eq!(sh(&imp, "stat -c %Y /srv/copy/sub/file /srv/copy/link")?, "-2\n-2\n");
        let seen = sh(&imp, "stat -c '%a %u %s' /srv/copy/sub/file; readlink /srv/copy/link")?;
        assert_eq!(seen, "640 0 3000000\n/nowhere\n");
        // Into a directory that exists, and its contents only.
        imp.run(["cp", "tree", "vm:/srv/copy"])?.good()?;
        imp.run(["cp", "tree/.", "vm:/tmp"])?.good()?;
        assert_eq!(sh(&imp, "ls -d /srv/copy/tree/sub /tmp/sub")?, "/srv/copy/tree/sub\n/tmp/sub\n");
        assert_eq!(sh(&imp, "stat -c %a /tmp")?, "1777\n");
        imp.run(["cp", "vm:/tmp/sub", "back"])?.good()?;
        let back = imp.folder().join("back/file");
        assert_eq!(fs::read(&back)?, vec![7; 3_000_000]);
        assert_eq!(fs::metadata(&back)?.mode() & 0o777, 0o640);
        imp.run(["cp", "vm:/srv/copy", "out"])?.good()?;
        for name in ["sub/file", "link"] {
            assert_eq!(fs::symlink_metadata(imp.folder().join("out").join(name))?.mtime(), -2, "{name}");
        }
        imp.end()
    })
}

#[test]
fn a_file_gets_the_name_of_the_destination_or_goes_into_it() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
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
    })
}

#[test]
fn what_the_kernel_makes_up_is_copied_whole_and_what_cannot_be_copied_is_named() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        for path in ["/proc/version", "/proc/filesystems", "/sys/kernel/mm/transparent_hugepage/enabled"] {
            imp.run(["cp", &format!("vm:{path}"), "made-up"])?.good()?;
            let copied = fs::read_to_string(imp.folder().join("made-up"))?;
            assert_eq!(copied, sh(&imp, &format!("cat {path}"))?, "{path}");
        }
        sh(
            &imp,
            "mkdir /tmp/odd && echo x > /tmp/odd/file && mkfifo /tmp/odd/fifo && mknod /tmp/odd/null c 1 3",
        )?;
        let came = imp.run(["cp", "vm:/tmp/odd", "odd"])?;
        assert_eq!(
            (came.code, came.stderr.as_str()),
            (Some(0), "warning: null is a device and was left out\n")
        );
        assert_eq!(fs::read_to_string(imp.folder().join("odd/file"))?, "x\n");
        assert!(imp.folder().join("odd/fifo").exists());
        // A tree that holds such a file system: none of what is made up below it is content.
        imp.run(["cp", "vm:/", "all"])?.good()?;
        assert!(imp.folder().join("all/bin").exists());
        assert_eq!(fs::read_dir(imp.folder().join("all/proc"))?.count(), 0);
        let came = imp.run(["cp", "vm:/dev/null", "device"])?;
        assert!(came.code == Some(1) && came.stderr.contains("nothing was copied"), "{}", came.stderr);
        imp.end()
    })
}

#[test]
fn the_same_is_so_for_what_this_machines_kernel_makes_up_and_for_what_cannot_be_copied_from_it()
-> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        imp.run(["cp", "/proc/version", "vm:/tmp/version"])?.good()?;
        assert_eq!(sh(&imp, "cat /tmp/version")?, fs::read_to_string("/proc/version")?);
        let tree = imp.folder().join("with-odd-files");
        fs::create_dir(&tree)?;
        fs::write(tree.join("file"), "x\n")?;
        let socket = std::os::unix::net::UnixListener::bind(tree.join("socket"))?;
        let came = imp.run(["cp", "with-odd-files", "vm:/tmp/from-here"])?;
        assert_eq!(
            (came.code, came.stderr.as_str()),
            (Some(0), "warning: socket is a socket and was left out\n")
        );
        assert_eq!(sh(&imp, "ls -A /tmp/from-here; cat /tmp/from-here/file")?, "file\nx\n");
        // Pipes and further names of a file are as they were.
        let odd = imp.folder().join("pipes-and-links");
        fs::create_dir(&odd)?;
        fs::write(odd.join("a"), "x\n")?;
        fs::hard_link(odd.join("a"), odd.join("b"))?;
        rustix::fs::mkfifoat(rustix::fs::CWD, odd.join("pipe"), rustix::fs::Mode::RUSR)?;
        imp.run(["cp", "pipes-and-links", "vm:/tmp/odd-links"])?.good()?;
        assert_eq!(
            sh(&imp, "cd /tmp/odd-links; ls; stat -c %h a; [ a -ef b ] && [ -p pipe ] && echo same")?,
            "a\nb\npipe\n2\nsame\n"
        );
        for path in ["with-odd-files/socket", "/dev/null"] {
            let came = imp.run(["cp", path, "vm:/tmp/odd-one"])?;
            assert!(came.code == Some(1) && came.stderr.contains("nothing was copied"), "{}", came.stderr);
            assert_eq!(sh(&imp, "ls -d /tmp/odd-one 2>/dev/null || echo none")?, "none\n");
        }
        drop(socket);
        fs::remove_dir_all(tree)?;
        imp.end()
    })
}

#[test]
fn a_stream_comes_out_and_goes_in() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        sh(&imp, "mkdir /tmp/d && echo one > /tmp/d/a")?;
        let archive = imp.folder().join("archive.tar");
        let child = imp.command(["cp", "vm:/tmp/d", "-"]).stdout(fs::File::create(&archive)?).spawn()?;
        assert_eq!(finish(child)?.code, Some(0));
        let child = imp.command(["cp", "-", "vm:/srv"]).stdin(fs::File::open(&archive)?).spawn()?;
        assert_eq!(finish(child)?.code, Some(0));
        assert_eq!(sh(&imp, "cat /srv/a")?, "one\n");
        imp.end()
    })
}

#[test]
fn links_owners_and_modes_are_kept_as_asked() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        sh(
            &imp,
            "mkdir -p /tmp/own && echo x > /tmp/own/real && ln -s real /tmp/own/link && chown 1000:10 /tmp/own/real",
        )?;
        imp.run(["cp", "vm:/tmp/own/link", "link"])?.good()?;
        assert_eq!(fs::read_link(imp.folder().join("link"))?.to_str(), Some("real"));
        imp.run(["cp", "-L", "vm:/tmp/own/link", "followed"])?.good()?;
        assert_eq!(fs::read_to_string(imp.folder().join("followed"))?, "x\n");
        imp.run(["cp", "-a", "vm:/tmp/own", "own"])?.good()?;
        let real = fs::metadata(imp.folder().join("own/real"))?;
        assert_eq!((real.uid(), real.gid()), (1000, 10));
        imp.run(["cp", "-a", "own", "vm:/tmp/kept"])?.good()?;
        imp.run(["cp", "own", "vm:/tmp/roots"])?.good()?;
        assert_eq!(sh(&imp, "stat -c %u:%g /tmp/kept/real /tmp/roots/real")?, "1000:10\n0:0\n");
        imp.end()
    })
}

#[test]
fn what_the_guest_sends_stays_below_the_destination() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        // A link of the guest's that leads out, and then a file of the same name behind it.
        sh(
            &imp,
            "mkdir -p /tmp/evil/one /tmp/evil/two/dir && ln -s ../outside /tmp/evil/one/dir && echo y > /tmp/evil/two/dir/file",
        )?;
        fs::create_dir_all(imp.folder().join("outside"))?;
        fs::create_dir_all(imp.folder().join("into"))?;
        imp.run(["cp", "vm:/tmp/evil/one/.", "into"])?.good()?;
        let came = imp.run(["cp", "vm:/tmp/evil/two/.", "into"])?;
        assert!(came.code == Some(1) && came.stderr.contains("would leave the directory"), "{}", came.stderr);
        assert_eq!(fs::read_dir(imp.folder().join("outside"))?.count(), 0);
        imp.end()
    })
}

#[test]
fn ends_that_make_no_copy_are_refused_with_the_way_to_do_it() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::new(DRIVER)?;
        for (ends, said) in [
            (["a", "b"], "write VM:PATH"),
            (["x:/a", "y:/b"], "takes a pipe"),
            (["x:/a", "y"], "no VM is called"),
        ] {
            let came = imp.run(["cp", ends[0], ends[1]])?;
            assert!(came.code == Some(1) && came.stderr.contains(said), "{}", came.stderr);
        }
        imp.end()
    })
}

/// The right to the lane of a VM, for as long as it is held.
fn lane(imp: &Imp, id: &str) -> io::Result<UnixStream> {
    let mut owner = UnixStream::connect(imp.socket().with_file_name("lanes.sock"))?;
    owner.write_all(format!("{id}\n").as_bytes())?;
    owner.read_exact(&mut [0; 8])?;
    Ok(owner)
}

#[test]
fn a_copy_goes_around_a_lane_that_somebody_else_has() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let vm = imp.inspect("vm")?;
        let id = vm["id"].as_str().unwrap_or_default().to_owned();
        let content: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
        fs::write(imp.folder().join("large"), &content)?;
        let there_and_back = |name: &str| -> anyhow::Result<()> {
            imp.run(["cp", "large", &format!("vm:/srv/{name}")])?.good()?;
            imp.run(["cp", &format!("vm:/srv/{name}"), name])?.good()?;
            anyhow::ensure!(fs::read(imp.folder().join(name))? == content, "{name} is another file");
            Ok(())
        };
        // The VM is shared, and so is its lane: another test's copy may be under way.
        let mut held = None;
        wait_until("the lane is free", || {
            held = lane(&imp, &id).ok();
            Ok(held.is_some())
        })?;
        assert!(lane(&imp, &id).is_err(), "two have the lane");
        there_and_back("around")?;
        drop(held);
        there_and_back("over")?;
        // Whoever is killed under way leaves it to the next.
        wait_until("a copy that has the lane was killed", || {
            let mut killed = imp.command(["cp", "-", "vm:/srv"]).stdin(Stdio::piped()).spawn()?;
            // More than a pipe holds: it is read by a copy that has asked for its lane.
            killed.stdin.as_mut().context("no stdin")?.write_all(&[0; 256 << 10])?;
            let has_it = lane(&imp, &id).is_err();
            killed.kill()?;
            killed.wait()?;
            Ok(has_it)
        })?;
        wait_until("the lane is free again", || Ok(lane(&imp, &id).is_ok()))?;
        there_and_back("again")?;
        imp.end()
    })
}
