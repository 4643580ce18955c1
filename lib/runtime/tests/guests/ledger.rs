//! Records that a crash, another boot or a damaged disk left behind.

use std::fs;
use std::process::Command;

use imp_runtime::VmId;
use imp_runtime::status::{Failure, Outcome};
use serde_json::{Value, json};

use super::driver::on_driver;
use super::host::{Host, outcome};

/// A record as an owner leaves it that was killed while the VM ran, with this process as its VMM.
fn record_of_a_running_vm(host: &Host, id: &VmId, vmm: Value) {
    let path = host.vm(id).join("record.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record["stage"] = json!({"stage": "running", "vmm": vmm});
    record["network"] = vmm;
    fs::write(path, serde_json::to_vec(&record).unwrap()).unwrap();
}

async fn created(host: &Host) -> VmId {
    let runtime = host.open().await;
    runtime.create(host.spec("vm", &["true"])).await.unwrap()
}

/// Field 22 of its stat: when it started.
fn start_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap()
}

#[test]
fn a_process_that_has_a_recorded_pid_by_chance_is_never_signalled() {
    on_driver(async {
        let host = Host::new();
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
        let mut bystander = Command::new("sleep").arg("1000").spawn().unwrap();
        let ticks = start_ticks(bystander.id());
        let records = [
            json!({"pid": bystander.id(), "start_ticks": ticks - 1, "boot_id": boot_id}),
            json!({"pid": bystander.id(), "start_ticks": ticks, "boot_id": "00000000-0000-0000-0000-000000000000"}),
            json!({"pid": 0, "start_ticks": 0, "boot_id": boot_id}),
        ];
        for record in records {
            let id = created(&host).await;
            record_of_a_running_vm(&host, &id, record.clone());
            let runtime = host.open().await;
            let Outcome::Failed { failure, .. } = outcome(&runtime, &id).await else { panic!("{record}") };
            assert_eq!(failure, Failure::GoneUnseen, "{record}");
            runtime.remove(&id).await.unwrap();
            drop(runtime);
            host.assert_nothing_left(&[id]);
            assert_eq!(bystander.try_wait().unwrap(), None, "{record}");
        }
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    });
}

#[test]
fn a_half_written_record_is_never_seen_and_a_damaged_one_is_left_alone_with_its_disk() {
    on_driver(async {
        let host = Host::new();
        let id = created(&host).await;
        // Killed while it replaced the record: the old one counts.
        let record = host.vm(&id).join("record.json");
        let text = fs::read(&record).unwrap();
        fs::write(host.vm(&id).join("record.new"), &text[..text.len() / 2]).unwrap();
        // Killed before the first record was there.
        let unborn: VmId = "00000000000000ff".parse().unwrap();
        fs::create_dir(host.vm(&unborn)).unwrap();
        fs::write(host.vm(&unborn).join("record.new"), "{\"form").unwrap();
        let runtime = host.open().await;
        let ended = outcome(&runtime, &id).await;
        assert!(matches!(ended, Outcome::Failed { failure: Failure::OwnerGone, .. }), "{ended:?}");
        assert!(!host.vm(&unborn).exists());
        runtime.remove(&id).await.unwrap();
        drop(runtime);
        host.assert_nothing_left(&[id, unborn]);

        // The machine went down before the content of a record was on its disk, and the VM with it.
        let id = created(&host).await;
        fs::write(host.vm(&id).join("record.json"), "").unwrap();
        drop(host.open().await);
        host.assert_nothing_left(&[id]);

        for damage in [&text[..text.len() / 2], b"{\"format\": 999}"] {
            let id = created(&host).await;
            let record = host.vm(&id).join("record.json");
            fs::write(&record, damage).unwrap();
            let runtime = host.open().await;
            // Others go on, also under the same name.
            let other = runtime.create(host.spec("vm", &["true"])).await.unwrap();
            runtime.remove(&other).await.unwrap();
            assert!(runtime.list().is_empty());
            assert_eq!(fs::read(&record).unwrap(), damage);
            // It may run: its disk stays.
            let pins = host.data().join("images/pins");
            assert!(fs::read_dir(&pins).unwrap().count() > 0, "{}", pins.display());
            drop(runtime);
            // By hand, as the error says who it is.
            fs::remove_dir_all(host.vm(&id)).unwrap();
            drop(host.open().await);
            host.assert_nothing_left(&[id]);
        }
    });
}
