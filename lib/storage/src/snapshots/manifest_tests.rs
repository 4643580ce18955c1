use proptest::prelude::*;

use super::*;
use crate::image::hostile_json::changed;
use crate::snapshots::fixture::manifest;

fn good() -> String {
    String::from_utf8(manifest().bytes().unwrap()).unwrap()
}

#[test]
fn bytes_and_back_are_the_same_manifest() {
    let manifest = manifest();
    assert_eq!(Manifest::parse(good().as_bytes()).unwrap(), manifest);
}

#[test]
fn another_format_is_named_before_anything_else_is_looked_at() {
    let newer = Manifest::parse(br#"{"format":2,"anything":[]}"#);
    assert!(matches!(newer, Err(Error::Format { found: 2 })));
}

#[test]
fn what_does_not_add_up_is_refused() {
    type Change = (fn(&mut Manifest), fn(&Error) -> bool);
    let changes: [Change; 13] = [
        (|it| it.format = 7, |error| matches!(error, Error::Format { found: 7 })),
        (|it| it.description.devices.memory += 1, |error| matches!(error, Error::Memory { .. })),
        (|it| it.description.devices.cpus = 0, |error| matches!(error, Error::Cpus(0))),
        (|it| it.description.devices.cpus = 5000, |error| matches!(error, Error::Cpus(5000))),
        (|it| it.description.devices.network = false, |error| matches!(error, Error::MacWithoutNetwork)),
        (
            |it| it.description.devices.mac = Some("06:00:0a:00:00".into()),
            |error| matches!(error, Error::Mac(_)),
        ),
        (
            |it| it.description.devices.mac = Some("06:00:0A:00:00:02".into()),
            |error| matches!(error, Error::Mac(_)),
        ),
        (|it| it.description.vmm.name.clear(), |error| matches!(error, Error::Text { .. })),
        (|it| it.description.vmm.version = "1\n2".into(), |error| matches!(error, Error::Text { .. })),
        (|it| it.description.cpu.model = "x".repeat(300), |error| matches!(error, Error::Text { .. })),
        (
            |it| it.parts.scratch.size = u64::MAX,
            |error| {
                matches!(error, Error::Part { part: Part::Scratch, source: chunks::Error::TooLarge { .. } })
            },
        ),
        (
            |it| it.parts.scratch.chunks.as_mut().unwrap().size = 4096,
            |error| matches!(error, Error::Part { source: chunks::Error::ChunkSize { .. }, .. }),
        ),
        (|it| it.parts.state.chunks = None, |error| matches!(error, Error::Mixed)),
    ];
    for (number, (change, is_expected)) in changes.into_iter().enumerate() {
        let mut manifest = manifest();
        change(&mut manifest);
        let bytes = serde_json::to_vec(&manifest).unwrap();
        let error = Manifest::parse(&bytes).expect_err("a manifest that cannot be true");
        assert!(is_expected(&error), "{number}: {error}");
        if number != 0 {
            assert!(manifest.bytes().is_err(), "{number}");
        }
    }
    let mut local = manifest();
    local.local = Some("x".into());
    assert!(matches!(local.bytes(), Err(Error::Mixed)));
}

#[test]
fn a_manifest_without_end_is_refused_unread() {
    let large = vec![b' '; LARGEST as usize + 1];
    assert!(matches!(Manifest::parse(&large), Err(Error::TooLarge { .. })));
}

/// Any that can be true.
fn manifests() -> impl Strategy<Value = Manifest> {
    let digest = || any::<[u8; 32]>().prop_map(Digest::from_bytes);
    let text = || "[ -~]{1,40}";
    let machine = (1u32..=1024, 0..=chunks::LARGEST_PART, any::<bool>(), prop::option::of(any::<[u8; 6]>()));
    let texts = (text(), text(), text(), text(), text());
    let digests = (digest(), digest(), digest(), prop::option::of(digest()), prop::option::of(digest()));
    let image = prop::option::of((digest(), prop::option::of("[a-z]{1,9}/[a-z0-9]{1,9}:[a-z0-9]{1,9}")));
    let sizes = (0u64..1 << 30, 0u64..=chunks::LARGEST_PART);
    (machine, texts, digests, image, sizes).prop_map(|(machine, texts, digests, image, sizes)| {
        let mut manifest = manifest();
        let content = |size| Content {
            size,
            chunks: Some(Chunks { size: chunks::size_for(size).unwrap(), digest: digests.0 }),
        };
        let (cpus, memory, network, mac) = machine;
        let mac = mac.filter(|_| network).map(|mac| mac.map(|byte| format!("{byte:02x}")).join(":"));
        let description = &mut manifest.description;
        description.devices = Devices { cpus, memory, network, mac };
        description.vmm = Vmm { name: texts.0, version: texts.1 };
        description.cpu = Cpu { vendor: texts.2, model: texts.3, features: digests.1 };
        description.agent = Agent { version: texts.4, digest: digests.2 };
        (description.template, description.parent) = (digests.3, digests.4);
        manifest.parts =
            Parts { memory: content(memory), state: content(sizes.0), scratch: content(sizes.1) };
        manifest.image =
            image.map(|(digest, name)| BaseImage { digest, name: name.map(|it| it.parse().unwrap()) });
        manifest
    })
}

proptest! {
    #[test]
    fn what_can_be_true_is_the_same_after_it_was_written_and_read(manifest in manifests()) {
        let bytes = manifest.bytes().unwrap();
        let read = Manifest::parse(&bytes).unwrap();
        prop_assert_eq!(&read, &manifest);
        prop_assert_eq!(read.bytes().unwrap(), bytes);
    }

    #[test]
    fn no_changed_value_makes_the_parser_panic_or_accept_what_it_would_not_write(text in changed(&good())) {
        if let Ok(manifest) = Manifest::parse(text.as_bytes()) {
            prop_assert!(manifest.bytes().is_ok());
        }
    }

    #[test]
    fn no_noise_makes_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Manifest::parse(&bytes).is_err());
    }
}
