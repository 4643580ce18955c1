//! A process that is killed at any step of a commit, an import, an export or a removal leaves a store that works.
//!
//! The process is this test binary, started again for one ignored test, and killed by strace as it enters one of the system
//! calls that change files: the first of its kind, the second, and so on until it gets through.

use std::env;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use imp_storage::blob::digest::Digest;
use imp_storage::image::reference::{Archive, ArchiveFormat};
use imp_storage::snapshots::{Error, Keeping};
use imp_storage::store::Store;
use imp_testkit::machine::program;

use crate::fixture::{assert_same, commit, content, description, draft, host, layout, leftovers, store};

/// Calls by which a step becomes visible to others, or lasting. A file that was only opened is seen at the call after.
const CALLS: [&str; 14] = [
    "mkdir",
    "write",
    "pwrite64",
    "ftruncate",
    "fallocate",
    "flock",
    "fsync",
    "fdatasync",
    "chmod",
    "ioctl",
    "rename",
    "unlink",
    "unlinkat",
    "rmdir",
];
const WORK: &str = "SNAPSHOT_WORK";
const ROOT: &str = "SNAPSHOT_ROOT";
const ARCHIVE: &str = "SNAPSHOT_ARCHIVE";

fn template() -> Digest {
    description().template.unwrap()
}

#[test]
#[ignore = "the process that the tests of this file start"]
fn worker() {
    let path = |name: &str| PathBuf::from(env::var_os(name).unwrap());
    let store = store(&path(ROOT));
    let snapshots = store.snapshots();
    match env::var(WORK).unwrap().as_str() {
        "commit" => {
            let made = snapshots.commit(draft(&store, 1), description(), Keeping::Durable).unwrap();
            snapshots.name(&template(), &made.digest).unwrap();
        }
        "import" => drop(snapshots.import(&layout(&path(ARCHIVE), None), &()).unwrap()),
        "export" => drop(export(&store, &exported(&path(ROOT), ArchiveFormat::OciLayout)).unwrap()),
        "export-tar" => drop(export(&store, &exported(&path(ROOT), ArchiveFormat::OciArchive)).unwrap()),
        "remove" => drop(snapshots.remove(&snapshots.list().unwrap()[0].digest).unwrap()),
        other => panic!("{other}"),
    }
}

/// Does the work and is killed at that call; false if it got through.
fn is_killed(work: &str, root: &Path, archive: &Path, call: &str, number: usize) -> bool {
    let status = Command::new(program("strace").unwrap())
        .args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={call}")])
        .args(["-e", &format!("inject={call}:signal=SIGKILL:when={number}")])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "crash::worker", "--ignored", "--test-threads=1"])
        .env(WORK, work)
        .env(ROOT, root)
        .env(ARCHIVE, archive)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success() || status.signal() == Some(9), "{call} {number}: {status}");
    !status.success()
}

/// Kills the work at each step and looks at what it left; `prepare` makes a store for each.
fn at_each_step(work: &str, prepare: impl Fn(&Path), archive: &Path, look: impl Fn(&Path, &str)) {
    let folder = tempfile::tempdir().unwrap();
    let mut steps = 0;
    for call in CALLS {
        for number in 1.. {
            let root = folder.path().join(format!("{call}-{number}"));
            prepare(&root);
            let killed = is_killed(work, &root, archive, call, number);
            look(&root, &format!("{work} killed at {call} {number}"));
            std::fs::remove_dir_all(&root).unwrap();
            if !killed {
                break;
            }
            steps += 1;
        }
    }
    assert!(steps > 30, "{work} has more steps than {steps}");
}

#[test]
fn a_kill_at_any_step_of_a_commit_leaves_a_whole_snapshot_or_none() {
    let look = |root: &Path, step: &str| {
        let store = store(root);
        assert_eq!(leftovers(root), Vec::<PathBuf>::new(), "{step}");
        let found = store.snapshots().list().unwrap();
        for summary in &found {
            store.snapshots().open(&summary.digest, &host()).unwrap();
            store.snapshots().verify(&summary.digest).unwrap();
        }
        if let Some(named) = store.snapshots().find(&template()).unwrap() {
            assert_eq!(named, found[0].digest, "{step}");
        }
        let again = commit(&store, 1);
        store.snapshots().open(&again.digest, &host()).unwrap();
        assert_eq!(store.snapshots().list().unwrap().len(), 1, "{step}");
    };
    at_each_step("commit", |_| {}, Path::new("none"), look);
}

#[test]
fn an_import_goes_on_after_a_kill_at_any_step() {
    let folder = tempfile::tempdir().unwrap();
    let ours = store(&folder.path().join("ours"));
    let made = commit(&ours, 1);
    let archive = folder.path().join("layout");
    ours.snapshots().export(&made.digest, &layout(&archive, None), &()).unwrap();
    let look = |root: &Path, step: &str| {
        let theirs = store(root);
        for summary in theirs.snapshots().list().unwrap() {
            theirs.snapshots().verify(&summary.digest).unwrap();
        }
        let arrival = theirs.snapshots().import(&layout(&archive, None), &()).unwrap();
        assert_same(&made, &arrival.snapshot);
        theirs.snapshots().open(&made.digest, &host()).unwrap();
        drop(arrival);
        assert_eq!(leftovers(root), Vec::<PathBuf>::new(), "{step}");
    };
    at_each_step("import", |_| {}, &archive, look);
}

#[test]
fn a_kill_at_any_step_of_a_removal_leaves_the_snapshot_or_nothing_of_it() {
    let prepare = |root: &Path| {
        let store = store(root);
        let made = commit(&store, 1);
        store.snapshots().name(&template(), &made.digest).unwrap();
    };
    let look = |root: &Path, step: &str| {
        let store = store(root);
        assert_eq!(leftovers(root), Vec::<PathBuf>::new(), "{step}");
        let found = store.snapshots().list().unwrap();
        match (store.snapshots().find(&template()).unwrap(), found.as_slice()) {
            (named, [one]) => {
                assert!(named.is_none_or(|named| named == one.digest), "{step}");
                store.snapshots().open(&one.digest, &host()).unwrap();
            }
            (None, []) => {
                let gone = store.snapshots().resolve("0000");
                assert!(matches!(gone, Err(Error::NoSnapshot(_))), "{step}");
                let verified = std::fs::read_dir(root.join("verified")).unwrap().count();
                assert_eq!(verified, 0, "{step}");
            }
            other => panic!("{step}: {other:?}"),
        }
    };
    at_each_step("remove", prepare, Path::new("none"), look);
}

/// Where the only snapshot of a store is exported to.
fn exported(root: &Path, format: ArchiveFormat) -> Archive {
    Archive { format, path: root.with_extension("exported").join("archive"), name: None }
}

fn export(store: &Store, to: &Archive) -> Result<Digest, Error> {
    let made = store.snapshots().list().unwrap().remove(0);
    store.snapshots().export(&made.digest, to, &())
}

fn ready_to_export(root: &Path) {
    commit(&store(root), 1);
    std::fs::create_dir_all(root.with_extension("exported")).unwrap();
}

/// What is there is whole, and all of it is there when the same is done again.
fn exports_again(root: &Path, format: ArchiveFormat, step: &str) {
    let (ours, to) = (store(root), exported(root, format));
    let folder = to.path.parent().unwrap();
    let names = |name: &Path| name.file_name().unwrap().to_string_lossy().into_owned();
    let half = |path: &PathBuf| names(path).starts_with(".imp-partial-");
    let made = ours.snapshots().open(&ours.snapshots().list().unwrap()[0].digest, &host()).unwrap();
    let imports = |number: u8| {
        let theirs = root.with_extension(format!("theirs-{number}"));
        let arrival = store(&theirs).snapshots().import(&to, &()).unwrap();
        assert_same(&made, &arrival.snapshot);
        drop(arrival);
        std::fs::remove_dir_all(theirs).unwrap();
    };
    for (path, bytes) in content(folder).iter().filter(|(path, _)| !half(path)) {
        if path.parent().unwrap().ends_with("blobs/sha256") {
            assert_eq!(Digest::of(bytes).hex(), names(path), "{step}");
        }
    }
    let whole = match format {
        ArchiveFormat::OciLayout => to.path.join("index.json"),
        ArchiveFormat::OciArchive | ArchiveFormat::DockerArchive => to.path.clone(),
    };
    if whole.exists() {
        imports(1);
    }
    export(&ours, &to).unwrap();
    imports(2);
    let left: Vec<PathBuf> = content(folder).into_keys().filter(half).collect();
    assert_eq!(left, Vec::<PathBuf>::new(), "{step}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_kill_at_any_step_of_an_export_leaves_nothing_half_written_and_the_next_one_works() {
    let look = |root: &Path, step: &str| exports_again(root, ArchiveFormat::OciLayout, step);
    at_each_step("export", ready_to_export, Path::new("none"), look);
}

#[test]
fn a_kill_at_any_step_of_an_export_into_one_file_leaves_a_whole_one_or_none() {
    let look = |root: &Path, step: &str| exports_again(root, ArchiveFormat::OciArchive, step);
    at_each_step("export-tar", ready_to_export, Path::new("none"), look);
}
