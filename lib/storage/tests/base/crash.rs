//! A build that is killed leaves nothing that is taken for an image.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use imp_storage::disk::remove_leftovers;
use imp_storage::image::base::{BaseOptions, Limits, base_key, write_base};

use crate::support::{TAR, Workplace};
use crate::tar_builder::Tar;

const DIRECTORY: &str = "IMP_TEST_CRASH_DIRECTORY";
const STEP: &str = "IMP_TEST_CRASH_STEP";

fn workplace() -> Workplace {
    let large = |name: &str| Tar::new().file(name, vec![b'x'; 1 << 20]);
    Workplace::new().layer(large("a")).layer(large("b"))
}

#[test]
fn a_build_killed_at_any_step_leaves_only_what_the_next_one_removes() {
    let workplace = workplace();
    let directory = workplace.directory.path();
    for step in 0..4 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "crash::dies_in_the_middle", "--ignored"]);
        let output = child.env(DIRECTORY, directory).env(STEP, step.to_string()).output().unwrap();
        assert_eq!(output.status.signal(), Some(9), "step {step}: {output:?}");
        assert!(!workplace.target().exists());
        assert_eq!(remove_leftovers(directory).unwrap(), 1, "step {step}");
    }
    let image = workplace.build();
    assert_eq!(image.names_of_all(), ["a", "b"]);
    assert_eq!(remove_leftovers(directory).unwrap(), 0);
}

#[test]
#[ignore = "run by a_build_killed_at_any_step_leaves_only_what_the_next_one_removes"]
fn dies_in_the_middle() {
    let directory = std::path::PathBuf::from(std::env::var_os(DIRECTORY).expect("run as a child"));
    let step: usize = std::env::var(STEP).unwrap().parse().unwrap();
    let mut layers = workplace().layers;
    for (position, layer) in layers.iter_mut().enumerate() {
        layer.path = directory.join(format!("layer-{position}"));
        assert_eq!(layer.media_type, TAR);
    }
    let options = BaseOptions { key: base_key(&layers), limits: Limits::default() };
    let mut calls = 0;
    let mut die = |_| {
        if calls == step {
            let this = rustix::process::getpid();
            rustix::process::kill_process(this, rustix::process::Signal::KILL).unwrap();
        }
        calls += 1;
    };
    write_base(&layers, &directory.join("base.ext4"), &options, &mut die).unwrap();
}
