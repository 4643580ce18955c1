//! Debian with systemd as its init, and with no more services than it takes to see it boot and end.

use std::path::{Path, PathBuf};

use super::{PATH, SYSTEMD, debian};
use crate::oci::{Image, Layer};

const PACKAGES: &[&str] =
    &["base-files", "bash", "coreutils", "dash", "mount", "systemd", "systemd-sysv", "util-linux"];

/// What a boot does not need, and an emulated guest would take long for.
const MASKED: &[&str] = &[
    "getty.target",
    "systemd-binfmt.service",
    "systemd-firstboot.service",
    "systemd-journal-flush.service",
    "systemd-logind.service",
    "systemd-machine-id-commit.service",
    "systemd-modules-load.service",
    "systemd-pcrphase-sysinit.service",
    "systemd-pcrphase.service",
    "systemd-random-seed.service",
    "systemd-sysctl.service",
    "systemd-sysusers.service",
    "systemd-tmpfiles-clean.timer",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-tmpfiles-setup.service",
    "systemd-update-utmp-runlevel.service",
    "systemd-update-utmp.service",
    "systemd-user-sessions.service",
];

/// Says in a file when it was started and when it was stopped, in order.
const SERVICE: &[u8] = b"[Unit]
Description=Tells of its life

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'echo started with $FROM_UNIT >> /var/life'
ExecStop=/bin/sh -c 'sleep 0.2; echo life stopped in order > /dev/console'
Environment=FROM_UNIT=systemd
StandardOutput=null

[Install]
WantedBy=multi-user.target
";

const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n";

pub(super) fn layout() -> anyhow::Result<PathBuf> {
    let packages = PACKAGES.join(",");
    super::cache::layout(
        "systemd",
        &[packages.as_bytes(), include_bytes!("systemd.rs"), include_bytes!("debian.rs"), SYSTEMD.as_bytes()],
        |folder| {
            let scratch = tempfile::tempdir()?;
            let debian = scratch.path().join("debian.tar");
            debian::unpack(&packages, &debian)?;
            image(&debian).write_layout(folder, SYSTEMD).map(drop)
        },
    )
}

fn image(debian: &Path) -> Image {
    let mut own = Layer::new()
        .file("etc/passwd", 0o644, PASSWD)
        .file("etc/group", 0o644, b"root:x:0:\ntty:x:5:\nnogroup:x:65534:\n")
        // There, and empty: this is not the first boot, at which systemd enables services by its own list.
        .file("etc/machine-id", 0o444, b"")
        .file("etc/systemd/system/life.service", 0o644, SERVICE)
        .symlink("etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target")
        .symlink("etc/systemd/system/multi-user.target.wants/life.service", "../life.service");
    for unit in MASKED {
        own = own.symlink(&format!("etc/systemd/system/{unit}"), "/dev/null");
    }
    Image::new().layer(Layer::from_tar_file(debian)).layer(own).entrypoint(&["/sbin/init"]).env(PATH)
}
