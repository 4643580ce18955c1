//! Every way in which a VM may end, each told apart, and nothing left of any.

use std::time::Duration;

use imp_runtime::spec::{DiskSize, KernelChoice, Memory};
use imp_runtime::status::{Failure, Outcome, State, VmmEnd};

use super::driver::on_driver;
use super::host::{Host, STUBBORN, deaf, exec, outcome, output, running, start};

const KILLED: Outcome = Outcome::Signalled { signal: 9, out_of_memory: false, timed_out: false };

#[test]
fn each_end_of_a_program_comes_out_as_what_it_was() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let code = start(&runtime, host.shell("code", "echo $SECRET; echo error >&2; exit 7")).await;
        let at_once = start(&runtime, host.spec("at-once", &["true"])).await;
        let signal = start(&runtime, host.shell("signal", "kill -SEGV $$")).await;
        let nothing = start(&runtime, host.spec("nothing", &["/nonexistent"])).await;
        let mut spec = host.spec("no-shell", &["/echo", "$literal 'quotes'"]);
        spec.base = host.disk_with_only("echo");
        let no_shell = start(&runtime, spec).await;
        let stubborn = start(&runtime, host.shell("stubborn", STUBBORN)).await;

        assert_eq!(outcome(&runtime, &code).await, Outcome::Exited { code: 7 });
        let text = output(&runtime, &code).await;
        assert!(text.contains("hunter2") && text.contains("error"), "{text}");
        let record = std::fs::read_to_string(host.vm(&code).join("record.json")).unwrap();
        assert!(!record.contains("hunter2"));
        assert_eq!(outcome(&runtime, &at_once).await, Outcome::Exited { code: 0 });
        let segv = Outcome::Signalled { signal: 11, out_of_memory: false, timed_out: false };
        assert_eq!(outcome(&runtime, &signal).await, segv);
        let not_started = outcome(&runtime, &nothing).await;
        assert!(matches!(not_started, Outcome::NotStarted { code: 127, .. }), "{not_started:?}");
        assert_eq!(outcome(&runtime, &no_shell).await, Outcome::Exited { code: 0 });
        assert_eq!(output(&runtime, &no_shell).await, "$literal 'quotes'\n");
        running(&runtime, &stubborn).await;
        deaf(&runtime, &stubborn).await;
        let stopped = runtime.stop(&stubborn, Some(Duration::from_secs(1))).await.unwrap();
        assert_eq!(stopped.outcome, Some(KILLED));
        host.end(runtime).await;
    });
}

#[test]
fn a_guest_that_runs_out_of_something_ends_or_goes_on_as_itself() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        // One process that takes more than there is.
        let greedy = start(
            &runtime,
            host.shell(
                "greedy",
                "echo 1 >/proc/sys/vm/overcommit_memory; exec dd if=/dev/zero of=/dev/null bs=400M count=1",
            ),
        )
        .await;
        // Memory that no process can give back.
        let full = "mount -t tmpfs -o size=100% full /mnt; dd if=/dev/zero of=/mnt/x bs=1M; exit 3";
        let machine = start(&runtime, host.shell("machine", full)).await;
        let mut spec = host.shell("disk", "dd if=/dev/zero of=/x bs=64k; echo $?; sleep 1000");
        spec.scratch = DiskSize::from_bytes(16 << 20).unwrap();
        let disk = start(&runtime, spec).await;

        let killed = Outcome::Signalled { signal: 9, out_of_memory: true, timed_out: false };
        assert_eq!(outcome(&runtime, &greedy).await, killed, "{:?}", runtime.console(&greedy).await);
        running(&runtime, &disk).await;
        let (text, code) =
            exec(&runtime, &disk, "dd if=/dev/zero of=/y bs=64k; rm /x /y; echo room >/z && cat /z").await;
        assert!(text.contains("No space left on device") && text.ends_with("room\n"), "{text}");
        assert_eq!(code, 0);
        let told = output(&runtime, &disk).await;
        assert!(told.contains("No space left on device") && told.ends_with("1\n"), "{told}");
        runtime.kill(&disk).await.unwrap();
        // The program, the machine, or both: what counts is that it ends and says so.
        let ended = outcome(&runtime, &machine).await;
        let as_itself = ended == killed
            || ended == Outcome::Exited { code: 3 }
            || matches!(ended, Outcome::Failed { failure: Failure::EndedWhileRunning { .. }, .. });
        assert!(as_itself, "{ended:?}");
        host.end(runtime).await;
    });
}

#[test]
fn a_guest_that_panics_fails_at_once_with_its_last_words() {
    on_driver(async {
        let host = Host::new();
        // Booting: an agent that is no program.
        let nonsense = host.path().with_extension("nonsense");
        std::fs::write(&nonsense, "not a program").unwrap();
        let mut config = host.config();
        config.guest_agent = nonsense.clone();
        let runtime = imp_runtime::Runtime::open(config).await.unwrap();
        let booting = start(&runtime, host.spec("booting", &["true"])).await;
        let Outcome::Failed { failure, console } = outcome(&runtime, &booting).await else {
            panic!("it ran")
        };
        assert_eq!(failure, Failure::EndedInBoot { vmm: VmmEnd::Reset });
        // Where a guest may boot again before it has answered, then once.
        let panics = console.iter().filter(|line| line.contains("Kernel panic")).count();
        assert!((1..=2).contains(&panics), "{console:#?}");
        // Not even a kernel.
        let kernel = host.path().with_extension("vmlinux");
        std::fs::write(&kernel, [&b"\x7fELF\x02\x01\x01"[..], &[0; 4096]].concat()).unwrap();
        let mut spec = host.spec("broken", &["true"]);
        spec.kernel = KernelChoice::File(kernel.clone());
        let broken = start(&runtime, spec).await;
        let Outcome::Failed { failure, console } = outcome(&runtime, &broken).await else { panic!("it ran") };
        assert!(matches!(failure, Failure::Spawn { .. } | Failure::EndedInBoot { .. }), "{failure:?}");
        assert!(!console.is_empty());
        std::fs::remove_file(nonsense).unwrap();
        std::fs::remove_file(kernel).unwrap();
        host.end(runtime).await;

        // Running, in the middle of an exec.
        let host = Host::new();
        let runtime = host.open().await;
        let mut spec = host.spec("running", &["sleep", "1000"]);
        spec.memory = Memory::from_bytes(96 << 20).unwrap();
        let id = start(&runtime, spec).await;
        running(&runtime, &id).await;
        let panics = super::host::try_exec(&runtime, &id, "echo c > /proc/sysrq-trigger; cat").await;
        assert!(panics.is_err(), "{panics:?}");
        let Outcome::Failed { failure, console } = outcome(&runtime, &id).await else {
            panic!("it ended well")
        };
        assert_eq!(failure, Failure::EndedWhileRunning { vmm: VmmEnd::Reset });
        assert!(console.iter().any(|line| line.contains("sysrq")), "{console:#?}");
        assert_eq!(runtime.get(&id).unwrap().state, State::Stopped);
        host.end(runtime).await;
    });
}
