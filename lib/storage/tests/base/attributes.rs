//! Owners, modes, times, devices, names and extended attributes arrive as they were.

use imp_storage::image::base::Refusal;

use crate::support::{image, refusal};
use crate::tar_builder::{Header, Tar};

#[test]
fn owners_modes_and_times_arrive_to_the_last_bit() {
    let mut big = Header::new(b'0', "big");
    big.base256(108, 8, 0xffff_ffff).base256(116, 8, 0x1234_5678).mode(0o7777).octal(136, 12, 1_700_000_000);
    let pax: [(&str, &[u8]); 3] = [("uid", b"4294967294"), ("gid", b"3000000000"), ("mtime", b"-1.5")];
    let tar = Tar::new().header(&big).pax(&pax).header(Header::new(b'5', "pax").mode(0o1777));
    let image = image([tar.header(Header::new(b'5', "./").mode(0o700).octal(108, 8, 7))]);

    let big = image.node("big");
    assert_eq!((big.uid, big.gid, big.mode & 0o7777), (0xffff_ffff, 0x1234_5678, 0o7777));
    assert_eq!((big.seconds, big.nanoseconds), (1_700_000_000, 0));
    let pax = image.node("pax");
    assert_eq!((pax.uid, pax.gid, pax.mode & 0o7777), (4_294_967_294, 3_000_000_000, 0o1777));
    assert_eq!((pax.seconds, pax.nanoseconds), (-2, 500_000_000));
    let root = image.node("");
    assert_eq!((root.uid, root.mode & 0o7777), (7, 0o700));
}

#[test]
fn a_later_directory_entry_changes_only_the_attributes() {
    let lower = Tar::new().directory("d").file("d/x", "x");
    let image = image([lower, Tar::new().header(Header::new(b'5', "d").mode(0o711).octal(116, 8, 5))]);
    assert_eq!((image.node("d").mode & 0o7777, image.node("d").gid), (0o711, 5));
    assert!(image.has("d/x"));
}

#[test]
fn devices_and_pipes_keep_their_kind_and_numbers() {
    let device = |flag, name, major, minor| {
        let mut header = Header::new(flag, name);
        header.device(major, minor);
        header
    };
    let tar = Tar::new()
        .header(&device(b'3', "null", 1, 3))
        .header(&device(b'4', "disk", 259, 70_000))
        .header(&device(b'3', "most", 4095, 1_048_575))
        .header(&Header::new(b'6', "pipe"));
    let image = image([tar]);
    assert_eq!((image.node("null").kind(), image.node("null").device()), (0o020_000, (1, 3)));
    assert_eq!((image.node("disk").kind(), image.node("disk").device()), (0o060_000, (259, 70_000)));
    assert_eq!(image.node("most").device(), (4095, 1_048_575));
    assert_eq!(image.node("pipe").kind(), 0o010_000);
    let none = Refusal::DeviceNumbers { major: 4096, minor: 0 };
    assert_eq!(refusal([Tar::new().header(&device(b'3', "no", 4096, 0))]), none);
}

#[test]
fn attributes_live_in_the_inode_or_in_a_block_or_in_both() {
    let capability = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let large = vec![b'v'; 3000];
    let pax: [(&str, &[u8]); 5] = [
        ("SCHILY.xattr.security.capability", capability),
        ("SCHILY.xattr.user.large", &large),
        ("SCHILY.xattr.user.empty", b""),
        ("SCHILY.xattr.user.text", b"a\nb"),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
    ];
    let image = image([Tar::new().pax(&pax).file("f", "x").pax(&pax[..1]).file("small", "x")]);
    let xattrs = &image.node("f").xattrs;
    assert_eq!(xattrs["security.capability"], capability);
    assert_eq!(xattrs["user.large"], large);
    assert_eq!(xattrs["user.empty"], b"");
    assert_eq!(xattrs["user.text"], b"a\nb");
    assert_eq!(xattrs.len(), 4, "what the host's overlay mount said is no business of the image");
    assert_eq!(image.node("small").xattrs["security.capability"], capability);
}

#[test]
fn attributes_past_what_ext4_can_hold_are_refused() {
    let fits = vec![b'v'; 4096 - 32 - 4 - 16 - 4];
    let name = "SCHILY.xattr.user.a";
    image([Tar::new().pax(&[(name, &fits)]).file("f", "x")]);
    assert_eq!(refusal([Tar::new().pax(&[(name, &[b'v'; 4096])]).file("f", "x")]), Refusal::Xattrs);
}

#[test]
fn acls_are_kept_in_the_form_that_ext4_has() {
    let entry = |tag: u16, permissions: u16, id: u32| {
        [tag.to_le_bytes().as_slice(), &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let any = u32::MAX;
    let call = [
        2_u32.to_le_bytes().to_vec(),
        entry(1, 6, any),
        entry(2, 4, 1000),
        entry(4, 4, any),
        entry(16, 4, any),
        entry(32, 0, any),
    ]
    .concat();
    let image = image([Tar::new().pax(&[("SCHILY.xattr.system.posix_acl_access", &call)]).file("f", "x")]);
    let stored = &image.node("f").xattrs["system.posix_acl_access"];
    assert_eq!(stored.len(), 4 + 4 * 4 + 8);
    assert_eq!(stored[..8], [1, 0, 0, 0, 1, 0, 6, 0]);
    assert_eq!(
        refusal([Tar::new().pax(&[("SCHILY.xattr.system.posix_acl_access", b"x")]).file("f", "")]),
        Refusal::Acl
    );
}

#[test]
fn names_of_every_length_arrive_in_every_format() {
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(255));
    let gnu = format!("{}/{}", "g".repeat(150), "h".repeat(150));
    let mut prefixed = Header::new(b'0', "name");
    prefixed.put(345, b"pre/fix");
    let mut v7 = Header::new(b'0', "v7");
    v7.put(257, &[0; 8]).put(345, b"junk");
    let mut v7_directory = Header::new(0, "v7dir/");
    v7_directory.put(257, &[0; 8]);
    let target = "t".repeat(300);
    let tar = Tar::new()
        .file(&long, "long")
        .gnu_long(b'L', &gnu)
        .header(&Header::new(b'0', "short"))
        .gnu_long(b'K', &target)
        .header(&Header::new(b'2', "link"))
        .header(&prefixed)
        .header(&v7)
        .header(&v7_directory)
        .file("ünïcode \n", "u");
    let image = image([tar]);
    assert_eq!(image.text(&long), "long");
    assert!(image.has(&gnu));
    assert_eq!(image.target("link"), target);
    for name in ["pre/fix/name", "v7", "v7dir", "ünïcode \n"] {
        assert!(image.has(name), "{name}");
    }
}
