//! What doctor says of the processor, the kernel and the user that VMs run with: pure, out of what each says of itself.

use super::{Check, Verdict, good};

/// The oldest kernel that Firecracker is made for.
const OLDEST_KERNEL: (u32, u32) = (5, 10);

/// From /proc/cpuinfo, of which the first processor speaks for all.
pub(super) fn processor(cpuinfo: &str) -> Check {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim()).unwrap_or_default()
    };
    let count = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let flags: Vec<&str> = field("flags").split_whitespace().collect();
    let has = |flag: &str| flags.contains(&flag);
    let nested = if has("hypervisor") { "; this machine is a VM itself" } else { "" };
    let clock = match (has("constant_tsc"), has("nonstop_tsc")) {
        (true, true) => "",
        (_, _) => "; its clock may change its rate or stop, which makes those of guests less exact",
    };
    let found = format!("{count} of {}{nested}{clock}", field("model name"));
    let virtualisation = [("vmx", "VT-x"), ("svm", "AMD-V")].into_iter().find(|(flag, _)| has(flag));
    match virtualisation {
        Some((_, name)) => good("processor", format!("{found}; {name}")),
        None => {
            let repair = if has("hypervisor") {
                "let the host of this machine pass virtualisation on (nested virtualisation)"
            } else {
                "turn virtualisation on in the machine's firmware"
            };
            Check {
                name: "processor",
                verdict: Verdict::Degraded { repair: Some(repair.to_owned()) },
                found: format!("{found}; neither VT-x nor AMD-V: guests are emulated"),
            }
        }
    }
}

/// Of this machine, not of guests.
pub(super) fn kernel(release: &str) -> Check {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((major, minor)),
        _ => None,
    };
    match version {
        Some(version) if version < OLDEST_KERNEL => Check {
            name: "host kernel",
            verdict: Verdict::Degraded { repair: Some("install Linux 5.10 or later".to_owned()) },
            found: format!("{release} is older than what Firecracker is made for"),
        },
        Some(_) | None => good("host kernel", release.to_owned()),
    }
}

/// As whom VMs are run: `missing` is what root lacks to be it in deed, as in a pod.
pub(super) fn user(uid: u32, missing: &[&str]) -> Check {
    let degraded = |found: String| Check { name: "user", verdict: Verdict::Degraded { repair: None }, found };
    match (uid, missing) {
        (0, []) => good("user", "root, with all that jails need".to_owned()),
        (0, missing) => degraded(format!(
            "root without {}, as in a pod or a container: no jails, so VMs run as this user, and what confines this \
             process confines them",
            missing.join(", ")
        )),
        (uid, _) => degraded(format!(
            "{uid}, who is not root: VMs run as this user and see the files of this user when they break out; no jails, \
             no bridge networks"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpuinfo(flags: &str) -> String {
        let one =
            |number| format!("processor\t: {number}\nmodel name\t: A Processor\nflags\t\t: fpu {flags}\n");
        [one(0), one(1)].join("\n")
    }

    #[test]
    fn a_processor_without_virtualisation_comes_with_what_turns_it_on() {
        let bare = processor(&cpuinfo("vmx constant_tsc nonstop_tsc"));
        assert_eq!((bare.verdict, bare.found.as_str()), (Verdict::Good, "2 of A Processor; VT-x"));
        assert!(processor(&cpuinfo("svm")).found.contains("less exact"));
        for (flags, repair) in [("hypervisor", "nested"), ("fpu", "firmware")] {
            let Verdict::Degraded { repair: Some(text) } = processor(&cpuinfo(flags)).verdict else {
                panic!()
            };
            assert!(text.contains(repair), "{text}");
        }
        assert!(matches!(processor("").verdict, Verdict::Degraded { .. }));
    }

    #[test]
    fn a_kernel_that_is_too_old_is_said_to_be() {
        for (release, verdict) in
            [("6.12.117+deb12-cloud-amd64", true), ("5.10.0-1", true), ("4.19.0-27-amd64", false)]
        {
            assert_eq!(kernel(release).verdict == Verdict::Good, verdict, "{release}");
        }
    }

    #[test]
    fn root_in_a_pod_is_told_what_is_missing_and_what_is_weaker() {
        assert_eq!(user(0, &[]).verdict, Verdict::Good);
        assert!(user(0, &["CAP_SYS_ADMIN"]).found.contains("without CAP_SYS_ADMIN"));
        let ordinary = user(1000, &["CAP_SYS_ADMIN"]);
        assert!(ordinary.found.starts_with("1000") && ordinary.verdict != Verdict::Good);
    }
}
