use proptest::prelude::*;

use super::*;
use crate::image::hostile_json;

fn descriptor(media_type: &str, content: &str, platform: &str) -> String {
    let platform = match platform.split('/').collect::<Vec<_>>().as_slice() {
        [os, architecture] => format!(r#","platform":{{"os":"{os}","architecture":"{architecture}"}}"#),
        [os, architecture, variant] => {
            format!(r#","platform":{{"os":"{os}","architecture":"{architecture}","variant":"{variant}"}}"#)
        }
        _ => String::new(),
    };
    let digest = Digest::of(content.as_bytes());
    format!(r#"{{"mediaType":"{media_type}","digest":"{digest}","size":3{platform}}}"#)
}

fn index(entries: &[&str]) -> String {
    let entries: Vec<_> =
        entries.iter().map(|platform| descriptor(OCI_MANIFEST, platform, platform)).collect();
    format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(","))
}

fn manifest(config: &str, layers: &[&str]) -> String {
    let layers: Vec<_> = layers.iter().map(|layer| descriptor(layer, layer, "")).collect();
    let config = descriptor(config, "config", "");
    format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{}]}}"#, layers.join(","))
}

fn choose(entries: &[&str], machine: &str) -> Result<Digest, Error> {
    let Document::Index(index) = parse(index(entries).as_bytes(), OCI_INDEX).unwrap() else {
        panic!("no index")
    };
    index.choose(&machine.parse().unwrap()).map(|chosen| chosen.digest)
}

#[test]
fn every_kind_of_image_is_known() {
    for (config, content_type) in
        [(OCI_CONFIG, OCI_MANIFEST), (DOCKER_CONFIG, DOCKER_MANIFEST), (OCI_CONFIG, "")]
    {
        let parsed = parse(manifest(config, &LAYERS).as_bytes(), content_type).unwrap();
        let Document::Image(image) = parsed else { panic!("{parsed:?}") };
        assert_eq!(image.layers.len(), LAYERS.len());
    }
    for content_type in [OCI_INDEX, DOCKER_LIST, "", "application/json; charset=utf-8"] {
        assert!(matches!(parse(index(&["linux/amd64"]).as_bytes(), content_type), Ok(Document::Index(_))));
    }
}

#[test]
fn what_is_not_an_image_is_a_typed_error() {
    let layer = LAYERS[1];
    let image = manifest(OCI_CONFIG, &[layer]);
    assert!(matches!(parse(b"{\"schemaVersion\":1,\"fsLayers\":[]}", ""), Err(Error::Schema1)));
    assert!(matches!(parse(b"{\"schemaVersion\":2}", SCHEMA_1[1]), Err(Error::Schema1)));
    assert!(matches!(parse(b"{\"schemaVersion\":1,\"config\":7}", ""), Err(Error::Schema1)));
    assert!(matches!(parse(image.as_bytes(), OCI_INDEX), Err(Error::UnknownType(_))));
    assert!(matches!(parse(image.as_bytes(), "application/vnd.other"), Err(Error::UnknownType(_))));
    assert!(matches!(parse(b"{\"schemaVersion\":2}", ""), Err(Error::UnknownType(_))));
    assert!(matches!(parse(b"not json", OCI_INDEX), Err(Error::Json(_))));
    let chart = manifest("application/vnd.cncf.helm.config.v1+json", &[layer]);
    assert!(matches!(parse(chart.as_bytes(), ""), Err(Error::NotAnImage(_))));
    let attestation = manifest(OCI_CONFIG, &["application/vnd.in-toto+json"]);
    assert!(matches!(parse(attestation.as_bytes(), ""), Err(Error::LayerType(_))));
    let many = manifest(OCI_CONFIG, &vec![layer; MOST_LAYERS + 1]);
    assert!(matches!(parse(many.as_bytes(), ""), Err(Error::Layers(_))));
    let huge = image.replace("\"size\":3", &format!("\"size\":{}", u64::MAX));
    assert!(matches!(parse(huge.as_bytes(), ""), Err(Error::BlobSize(_))));
    let negative = image.replace("\"size\":3", "\"size\":-3");
    assert!(matches!(parse(negative.as_bytes(), ""), Err(Error::Json(_))));
    assert!(matches!(parse(&vec![b' '; LARGEST as usize + 1], ""), Err(Error::TooLarge(_))));
}

#[test]
fn a_document_with_the_fields_of_both_kinds_is_neither() {
    let both = manifest(OCI_CONFIG, &[LAYERS[0]]).replacen('{', r#"{"manifests":[],"#, 1);
    for content_type in ["", OCI_INDEX, OCI_MANIFEST] {
        assert!(matches!(parse(both.as_bytes(), content_type), Err(Error::UnknownType(_))), "{content_type}");
    }
}

#[test]
fn the_platform_that_runs_best_is_chosen() {
    for (entries, machine, chosen) in [
        (vec!["linux/arm64", "linux/amd64"], "linux/amd64", "linux/amd64"),
        (vec!["linux/arm/v6", "linux/arm/v7"], "linux/arm/v7", "linux/arm/v7"),
        (vec!["linux/arm/v7", "linux/arm/v6"], "linux/arm/v6", "linux/arm/v6"),
        (vec!["linux/arm64/v8"], "linux/arm64", "linux/arm64/v8"),
        (vec![""], "linux/amd64", ""),
    ] {
        assert_eq!(
            choose(&entries, machine).unwrap(),
            Digest::of(chosen.as_bytes()),
            "{entries:?} on {machine}"
        );
    }
}

#[test]
fn a_missing_platform_is_an_error_that_names_what_exists() {
    let error = choose(&["linux/arm64", "windows/amd64", "unknown/unknown", "linux/arm64"], "linux/amd64")
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the image has nothing for linux/amd64; it is there for: linux/arm64, windows/amd64"
    );
    assert!(choose(&["", ""], "linux/amd64").is_err());
    assert!(choose(&[], "linux/amd64").unwrap_err().to_string().ends_with("no platform at all"));
}

#[test]
fn what_builders_attach_to_an_image_is_never_chosen() {
    let entries = index(&["linux/arm64", "linux/amd64"]);
    let attached = entries.replace(
        r#""architecture":"amd64"}"#,
        r#""architecture":"amd64"},"annotations":{"vnd.docker.reference.type":"attestation-manifest"}"#,
    );
    let Document::Index(index) = parse(attached.as_bytes(), "").unwrap() else { panic!("no index") };
    assert!(matches!(index.choose(&"linux/amd64".parse().unwrap()), Err(Error::Platform { .. })));
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in "\\PC{0,20}") {
        let _ = parse(&bytes, &kind);
    }

    #[test]
    fn a_document_changed_anywhere_is_parsed_or_refused(at in 0usize..400, byte: u8) {
        let mut bytes = manifest(OCI_CONFIG, &LAYERS).into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(Document::Image(image)) = parse(&bytes, "") {
            prop_assert!(image.layers.len() <= MOST_LAYERS);
        }
    }

    #[test]
    fn a_document_with_any_value_changed_is_parsed_within_bounds_or_refused(
        text in prop_oneof![
            hostile_json::changed(&manifest(OCI_CONFIG, &LAYERS)),
            hostile_json::changed(&index(&["linux/amd64", "linux/arm/v7", "windows/amd64"])),
        ],
        kind in prop::sample::select(vec!["", OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST]),
    ) {
        match parse(text.as_bytes(), kind) {
            Ok(Document::Image(image)) => {
                prop_assert!(image.layers.iter().all(|layer| layer.size <= LARGEST_BLOB));
                prop_assert!(image.layers.iter().all(|layer| LAYERS.contains(&layer.media_type.as_str())));
            }
            Ok(Document::Index(index)) => {
                let _ = index.choose(&"linux/amd64".parse().unwrap());
            }
            Err(_) => {}
        }
    }
}
