//! What a process needs to be root in deed and not in name alone: in a container or a pod much of it is taken away.

use rustix::thread::CapabilitySet;

/// What the jailer does as root, and this process for it: another user and group, a root directory with devices in it, file
/// systems mounted there, a process namespace, files that belong to somebody else.
const JAIL: [(&str, CapabilitySet); 8] = [
    ("CAP_SYS_ADMIN", CapabilitySet::SYS_ADMIN),
    ("CAP_SYS_CHROOT", CapabilitySet::SYS_CHROOT),
    ("CAP_MKNOD", CapabilitySet::MKNOD),
    ("CAP_SETUID", CapabilitySet::SETUID),
    ("CAP_SETGID", CapabilitySet::SETGID),
    ("CAP_CHOWN", CapabilitySet::CHOWN),
    ("CAP_DAC_OVERRIDE", CapabilitySet::DAC_OVERRIDE),
    ("CAP_KILL", CapabilitySet::KILL),
];

/// Names of what a process with these capabilities lacks to make jails.
pub(crate) fn missing_for_jails(has: CapabilitySet) -> Vec<&'static str> {
    JAIL.iter().filter(|(_, needed)| !has.contains(*needed)).map(|(name, _)| *name).collect()
}

/// What this process may do.
pub(crate) fn own() -> Result<CapabilitySet, rustix::io::Errno> {
    rustix::thread::capabilities(None).map(|sets| sets.effective)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_container_takes_away_is_named() {
        assert!(missing_for_jails(CapabilitySet::all()).is_empty());
        // What a container has by default.
        let container = CapabilitySet::CHOWN
            | CapabilitySet::DAC_OVERRIDE
            | CapabilitySet::KILL
            | CapabilitySet::MKNOD
            | CapabilitySet::SETGID
            | CapabilitySet::SETUID
            | CapabilitySet::SYS_CHROOT;
        assert_eq!(missing_for_jails(container), ["CAP_SYS_ADMIN"]);
        assert_eq!(missing_for_jails(CapabilitySet::empty()).len(), JAIL.len());
    }
}
