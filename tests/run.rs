//! `imp run` is as easy as a container: output, input, exit status, signals, and nothing left behind.

use std::io::{BufRead, BufReader};

use imp_testkit::imp::{Imp, finish, wait_until};

use super::driver::on_driver;
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

fn sh(script: &str) -> Vec<String> {
    ["run", "--rm", "--network", "none", IMAGE, "sh", "-c", script].map(str::to_owned).to_vec()
}

#[test]
fn output_and_exit_status_are_the_programs_own() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let came = imp.run(sh("echo out; echo err >&2; exit 7"))?;
        assert_eq!((came.code, came.stdout.as_str(), came.stderr.as_str()), (Some(7), "out\n", "err\n"));
        assert_eq!(imp.run(sh("kill -9 $$"))?.code, Some(137));
        imp.end()
    })
}

#[test]
fn input_is_passed_on_whole_and_its_end_too() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let input: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
        let line = ["run", "--rm", "-i", "--network", "none", IMAGE, "sh", "-c", "wc -c; cat"];
        let came = imp.run_with_input(line, &input)?;
        assert_eq!(came.good()?.trim(), input.len().to_string());
        imp.end()
    })
}

#[test]
fn a_signal_to_the_command_reaches_the_program() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.1; done";
        let mut child = imp.command(sh(script)).spawn()?;
        let mut stdout = BufReader::new(child.stdout.take().ok_or_else(|| anyhow::anyhow!("no stdout"))?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        assert_eq!(line, "ready\n");
        let status = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
        assert!(status.success());
        line.clear();
        stdout.read_line(&mut line)?;
        assert_eq!(line, "caught\n");
        assert_eq!(finish(child)?.code, Some(3));
        imp.end()
    })
}

#[test]
fn what_is_copied_in_is_there_and_what_is_read_only_cannot_be_written() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let source = imp.folder().join("source");
        std::fs::create_dir(&source)?;
        std::fs::write(source.join("file"), "from here\n")?;
        let volume = format!("{}:/in:ro", source.display());
        let script = "cat /in/file /etc/one /new/two; touch /in/new 2>/dev/null && echo written; \
        echo more >> /etc/one && echo written; echo more >> /new/two && cat /new/two";
        let files = ["-v", "./source/file:/etc/one:ro", "-v", "./source/file:/new/two"];
        let line = ["run", "--rm", "--network", "none", "-v", &volume].into_iter().chain(files);
        let came = imp.run(line.chain([IMAGE, "sh", "-c", script]))?;
        let expected = "from here\nfrom here\nfrom here\nfrom here\nmore\n";
        assert_eq!(came.stdout, expected, "{}", came.stderr);
        assert_eq!(std::fs::read_to_string(source.join("file"))?, "from here\n");
        assert_eq!(std::fs::read_dir(&source)?.count(), 1);
        imp.end()
    })
}

#[test]
fn a_copy_to_a_place_below_a_file_is_refused_with_both_paths_and_what_to_do() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        std::fs::write(imp.folder().join("file"), "x")?;
        let line = ["run", "--rm", "--network", "none", "-v", "./file:/bin/busybox/deep/x", IMAGE, "true"];
        let came = imp.run(line)?;
        assert_eq!(came.code, Some(125));
        let said =
            ["/file cannot be copied to /bin/busybox/deep/x", "directory /bin/busybox", "another GUEST-PATH"];
        for words in said {
            assert!(came.stderr.contains(words), "{words:?} is not in {}", came.stderr);
        }
        imp.end()
    })
}

#[test]
fn a_reader_that_goes_away_ends_the_program() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let mut child = imp.command(["run", "--rm", "--network", "none", IMAGE, "yes"]).spawn()?;
        let mut stdout = BufReader::new(child.stdout.take().ok_or_else(|| anyhow::anyhow!("no stdout"))?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        drop(stdout);
        let came = finish(child)?;
        assert_eq!((came.code, came.stderr.as_str()), (Some(141), ""));
        wait_until("no VM is listed", || Ok(imp.run(["ps", "-aq"])?.good()?.is_empty()))?;
        imp.end()
    })
}

#[test]
fn output_of_many_megabytes_arrives_whole() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let came = imp.run(sh("head -c 5000000 /dev/zero | tr '\\0' x"))?;
        assert_eq!((came.code, came.stdout.len()), (Some(0), 5_000_000), "{}", came.stderr);
        imp.end()
    })
}
