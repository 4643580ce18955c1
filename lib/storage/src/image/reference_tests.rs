use proptest::prelude::*;

use super::*;

const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
fn names_mean_what_docker_users_expect() {
    let digest = format!("sha256:{HEX}");
    for (text, canonical, familiar) in [
        ("alpine", "docker.io/library/alpine:latest", "alpine:latest"),
        ("alpine:3", "docker.io/library/alpine:3", "alpine:3"),
        ("some/thing", "docker.io/some/thing:latest", "some/thing:latest"),
        ("library/alpine", "docker.io/library/alpine:latest", "alpine:latest"),
        ("docker.io/alpine", "docker.io/library/alpine:latest", "alpine:latest"),
        ("index.docker.io/alpine", "docker.io/library/alpine:latest", "alpine:latest"),
        ("docker.io/library/oci:1", "docker.io/library/oci:1", "oci:1"),
        ("localhost/x", "localhost/x:latest", "localhost/x:latest"),
        ("localhost:5000", "docker.io/library/localhost:5000", "localhost:5000"),
        ("localhost:5000/x", "localhost:5000/x:latest", "localhost:5000/x:latest"),
        ("localhost:5000/x/y/z:1.2-3_4", "localhost:5000/x/y/z:1.2-3_4", "localhost:5000/x/y/z:1.2-3_4"),
        ("host.example/x", "host.example/x:latest", "host.example/x:latest"),
        ("Host/x", "Host/x:latest", "Host/x:latest"),
        ("host:1/x:Tag", "host:1/x:Tag", "host:1/x:Tag"),
        ("10.0.0.1:80/a", "10.0.0.1:80/a:latest", "10.0.0.1:80/a:latest"),
        ("[::1]:5000/a", "[::1]:5000/a:latest", "[::1]:5000/a:latest"),
        ("[fd00::2]/a:t", "[fd00::2]/a:t", "[fd00::2]/a:t"),
        ("a__b/c--d/e.f", "docker.io/a__b/c--d/e.f:latest", "a__b/c--d/e.f:latest"),
    ] {
        let reference: Reference = text.parse().unwrap();
        assert_eq!(reference.to_string(), canonical, "{text}");
        assert_eq!(reference.familiar(), familiar, "{text}");
    }
    let pinned: Reference = format!("alpine@{digest}").parse().unwrap();
    assert_eq!((pinned.tag(), pinned.digest().unwrap().to_string()), (None, digest.clone()));
    let both: Reference = format!("h:1/a:t@{digest}").parse().unwrap();
    assert_eq!((both.tag(), both.to_string()), (Some("t"), format!("h:1/a:t@{digest}")));
}

#[test]
fn what_docker_refuses_is_refused_with_the_reason() {
    assert_eq!("".parse::<Reference>(), Err(Error::Empty));
    assert!(matches!(HEX.parse::<Reference>(), Err(Error::BareId(_))));
    for text in ["Alpine", "some/Thing", "host.example/UPPER"] {
        assert!(matches!(text.parse::<Reference>(), Err(Error::UpperCase(_))), "{text}");
    }
    for text in [
        "a//b",
        "/a",
        "a/",
        "-a",
        "a-",
        "a..b",
        "a___b",
        "a._b",
        "a b",
        "ä",
        "host.example/",
        "../x",
        "a/../b",
    ] {
        let parsed = text.parse::<Reference>();
        assert!(matches!(parsed, Err(Error::Repository(..) | Error::Domain(..))), "{text}: {parsed:?}");
    }
    for text in ["a:", "a:-x", "a:.x", "a:x y", &format!("a:{}", "x".repeat(129))] {
        assert!(matches!(text.parse::<Reference>(), Err(Error::Tag(..))), "{text}");
    }
    for text in ["h-.x/a", "h:99999/a", "h:x/a", "[::1/a", "[x]/a", "[::1]x/a", "http://h/a", "h.:1/a"] {
        let parsed = text.parse::<Reference>();
        assert!(matches!(parsed, Err(Error::Domain(..) | Error::Repository(..))), "{text}: {parsed:?}");
    }
    for text in ["a@", "a@sha256:12", "a@sha512:00", &format!("a@sha256:{HEX}@sha256:{HEX}")] {
        assert!(matches!(text.parse::<Reference>(), Err(Error::Digest(..))), "{text}");
    }
    assert!(matches!("a/".repeat(200).parse::<Reference>(), Err(Error::TooLong(_))));
}

#[test]
fn archives_are_told_from_registries_by_their_prefix() {
    let archive = |format, path: &str, name: Option<&str>| {
        Source::Archive(Archive { format, path: path.into(), name: name.map(str::to_owned) })
    };
    for (text, source) in [
        ("oci:/a/b", archive(ArchiveFormat::OciLayout, "/a/b", None)),
        ("oci:b:1.0", archive(ArchiveFormat::OciLayout, "b", Some("1.0"))),
        ("oci-archive:b.tar:x", archive(ArchiveFormat::OciArchive, "b.tar", Some("x"))),
        ("docker-archive:b.tar:x/y:1", archive(ArchiveFormat::DockerArchive, "b.tar", Some("x/y:1"))),
    ] {
        assert_eq!(text.parse::<Source>().unwrap(), source);
        assert_eq!(source.to_string(), text);
    }
    assert!(matches!("oci".parse::<Source>(), Ok(Source::Registry(_))));
    for text in ["oci:", "docker-archive:", "oci::x", "oci:x:"] {
        assert!(matches!(text.parse::<Source>(), Err(Error::NoPath(..))), "{text}");
    }
}

fn reference() -> impl Strategy<Value = String> {
    let domain = prop_oneof![
        Just(String::new()),
        "[a-z]{1,5}\\.[a-z]{1,5}/",
        "localhost(:[1-9][0-9]{0,3})?/",
        "[A-Z][a-z0-9]{0,3}(:[1-9][0-9]{0,3})?/",
        "\\[::[0-9a-f]{1,4}\\](:[1-9][0-9]{0,3})?/",
    ];
    let path = "[a-z0-9]{1,4}((_|__|-{1,3})[a-z0-9]{1,4}){0,2}(/[a-z0-9]{1,4}(\\.[a-z0-9]{1,3})?){0,2}";
    let tag = "(:[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,9})?";
    let digest = "(@sha256:[0-9a-f]{64})?";
    (domain, path, tag, digest).prop_map(|(domain, path, tag, digest)| format!("{domain}{path}{tag}{digest}"))
}

proptest! {
    #[test]
    fn the_canonical_text_and_the_familiar_text_parse_to_the_same_reference(text in reference()) {
        let parsed: Reference = text.parse().unwrap();
        prop_assert_eq!(parsed.to_string().parse::<Reference>(), Ok(parsed.clone()));
        prop_assert_eq!(parsed.familiar().parse::<Reference>(), Ok(parsed.clone()));
        prop_assert!(parsed.tag().is_some() || parsed.digest().is_some());
    }

    #[test]
    fn whatever_is_accepted_is_safe_in_a_url_and_in_a_path(text in "[a-zA-Z0-9:@./_\\[\\] %?#\\\\-]{0,40}") {
        if let Ok(parsed) = text.parse::<Reference>() {
            prop_assert!(parsed.repository().split('/').all(|part| !part.is_empty() && part != "." && part != ".."));
            prop_assert!(!parsed.to_string().contains(['?', '#', '%', ' ', '\\']));
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC*") {
        let _ = text.parse::<Source>();
    }

    #[test]
    fn a_reference_with_any_letters_changed_is_refused_or_means_one_thing(
        good in reference(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), "[a-zA-Z0-9:@./_\\[\\] %?#\\\\\0-]{0,2}"), 1..3)
    ) {
        let mut text: Vec<char> = good.chars().collect();
        for (at, with) in changes {
            let at = at.index(text.len().max(1)).min(text.len());
            text.splice(at..(at + 1).min(text.len()), with.chars());
        }
        let text = String::from_iter(text);
        if let Ok(parsed) = text.parse::<Reference>() {
            prop_assert_eq!(parsed.to_string().parse::<Reference>(), Ok(parsed.clone()));
            prop_assert!(parsed.repository().split('/').all(|part| !part.is_empty() && part != "." && part != ".."));
            prop_assert!(!parsed.to_string().contains(['?', '#', '%', ' ', '\\', '\0']));
        }
    }
}
