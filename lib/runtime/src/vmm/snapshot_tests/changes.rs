//! What has changed in a machine's memory is all that tells it from what the machine began with.

use super::*;

#[test]
fn changes_over_what_a_machine_began_with_are_its_memory_to_the_last_byte_however_often_they_are_written() {
    node::inside_within(LONG * 2, || run(async { exact(&firecracker(Ok(())).await).await }));
}

async fn exact(driver: &dyn Driver) {
    let place = Place::new();
    let files = |name: &str| SnapshotFiles {
        state: place.path(&format!("{name}.state")),
        memory: place.path(&format!("{name}.memory")),
    };
    let scratch = place.path("scratch.img");
    imp_storage::disk::create_scratch(&scratch, 32 * MIB).unwrap();
    let mut parent = place.begin(driver, 1, place.boots(), &scratch).await.guest().await;
    let began = files("began");
    parent.snapshot(SnapshotKind::Full, &scratch, &began, &place.path("began.img")).await;
    parent.end().await;

    let disk = place.path("began.img");
    let mut machine = place.begin(driver, 2, Origin::Snapshot(began.clone()), &disk).await.resumed().await;
    for round in ["one", "two", "three"] {
        machine.says(&format!("head -c 3000000 /dev/urandom >/dev/shm/{round}; sync")).await;
        let copy = place.path(&format!("{round}.img"));
        machine.snapshot(SnapshotKind::Changes, &disk, &files(round), &copy).await;
        machine.says("rm -f /dev/shm/one").await;
    }
    machine.machine.pause().await.unwrap();
    let changes = files("changes");
    machine.machine.snapshot(SnapshotKind::Changes, &changes).await.unwrap();
    let merged = place.path("merged");
    fs::copy(&began.memory, &merged).unwrap();
    merge(&changes.memory, &merged).unwrap();
    assert!(blocks(&changes.memory) < blocks(&began.memory) / 2, "changes are fewer than the whole");
    let (merged, memory) = (fs::read(&merged).unwrap(), memory(&machine.process, &began.memory));
    let other = merged.chunks(4096).zip(memory.chunks(4096)).enumerate().filter(|(_, (one, two))| one != two);
    assert_eq!(other.map(|(page, _)| page).collect::<Vec<_>>(), [0; 0], "of {} pages", memory.len() / 4096);
    assert_eq!(merged.len(), memory.len());
    machine.end().await;
}

/// What a process has now where it has mapped a file privately.
fn memory(process: &Process, file: &Path) -> Vec<u8> {
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(file).unwrap()).to_string();
    let maps = fs::read_to_string(format!("/proc/{}/maps", process.pid())).unwrap();
    let mapping = maps.lines().find(|line| line.split_ascii_whitespace().nth(4) == Some(&inode)).unwrap();
    let (start, end) = mapping.split_once(' ').unwrap().0.split_once('-').unwrap();
    let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
    let mut memory = vec![0; (end - start) as usize];
    let process = fs::File::open(format!("/proc/{}/mem", process.pid())).unwrap();
    process.read_exact_at(&mut memory, start).unwrap();
    memory
}
