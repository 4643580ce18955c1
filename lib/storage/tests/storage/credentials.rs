//! Registries that want to know who asks.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use imp_storage::image::registry;
use imp_storage::store::{Error, PullPolicy, Store};
use imp_testkit::registry::{FaultProxy, Reaction, Request};

use crate::fixture::{Fixture, chain, options, reference};

/// `user:secret`
const BASIC: &str = "Basic dXNlcjpzZWNyZXQ=";

fn login(fixture: &Fixture, host: &str, entry: &str) -> PathBuf {
    let path = fixture.folder.path().join("config.json");
    std::fs::write(&path, format!(r#"{{"auths":{{"{host}":{entry}}}}}"#)).unwrap();
    path
}

fn pull(fixture: &Fixture, proxy: &FaultProxy, config: Option<PathBuf>) -> Result<(), Error> {
    let mut options = options(&[proxy.address()]);
    options.registries.docker_config = config;
    let store = Store::open(fixture.root(), options).unwrap();
    store.pull(&reference(proxy.address(), "app:1"), PullPolicy::Missing, &()).map(drop)
}

/// A token server in front of the registry: `token` decides which token a request at it gets.
fn with_tokens(
    fixture: &Fixture,
    token: impl Fn(&Request) -> Option<&'static str> + Send + Sync + 'static,
    is_good: impl Fn(&str) -> bool + Send + Sync + 'static,
) -> FaultProxy {
    fixture.proxy(move |request| {
        let host = request.header("host").unwrap().to_owned();
        if request.path.starts_with("/token") {
            return match token(request) {
                Some(token) => {
                    Reaction::status(200, &[], &format!(r#"{{"token":"{token}","expires_in":60}}"#))
                }
                None => Reaction::status(401, &[], ""),
            };
        }
        match request.header("authorization").and_then(|value| value.strip_prefix("Bearer ")) {
            Some(token) if is_good(token) => Reaction::Forward,
            _ => {
                let challenge = format!(
                    r#"Bearer realm="http://{host}/token",service="tests",scope="repository:app:pull""#
                );
                Reaction::status(401, &[("www-authenticate", &challenge)], "")
            }
        }
    })
}

#[test]
fn anyone_gets_a_token_for_a_public_image() {
    let fixture = Fixture::new();
    let anonymous = |request: &Request| request.header("authorization").is_none().then_some("t0");
    let proxy = with_tokens(&fixture, anonymous, |token| token == "t0");
    pull(&fixture, &proxy, None).unwrap();
    let tokens: Vec<_> =
        proxy.requests().into_iter().filter(|request| request.path.starts_with("/token")).collect();
    assert_eq!(tokens.len(), 1, "one token serves the whole pull");
    assert!(
        tokens[0].path.contains("scope=repository%3Aapp%3Apull") && tokens[0].path.contains("service=tests")
    );
}

#[test]
fn a_login_is_shown_to_the_token_server_and_never_to_the_registry() {
    let fixture = Fixture::new();
    let known = |request: &Request| (request.header("authorization") == Some(BASIC)).then_some("t1");
    let proxy = with_tokens(&fixture, known, |token| token == "t1");
    let config = login(&fixture, proxy.address(), r#"{"username":"user","password":"secret"}"#);
    pull(&fixture, &proxy, Some(config)).unwrap();
    let to_registry = proxy.requests().into_iter().filter(|request| request.path.starts_with("/v2"));
    assert!(to_registry.clone().count() > 0);
    assert!(to_registry.into_iter().all(|request| request.header("authorization") != Some(BASIC)));
}

#[test]
fn an_identity_token_is_exchanged() {
    let fixture = Fixture::new();
    let proxy =
        with_tokens(&fixture, |request| (request.method == "POST").then_some("t2"), |token| token == "t2");
    let config = login(&fixture, proxy.address(), r#"{"identitytoken":"id"}"#);
    pull(&fixture, &proxy, Some(config)).unwrap();
}

#[test]
fn a_token_that_expires_within_a_pull_is_fetched_anew() {
    let fixture = Fixture::new();
    let (issued, used) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let token = move |_: &Request| Some(["first", "second"][issued.fetch_add(1, Ordering::SeqCst).min(1)]);
    // The first token is good for the manifest alone.
    let proxy = with_tokens(&fixture, token, move |token| {
        token == "second" || (token == "first" && used.fetch_add(1, Ordering::SeqCst) == 0)
    });
    pull(&fixture, &proxy, None).unwrap();
}

#[test]
fn a_password_is_sent_only_when_the_registry_asks_for_one() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|request| match request.header("authorization") {
        Some(BASIC) => Reaction::Forward,
        _ => Reaction::status(401, &[("www-authenticate", "Basic realm=\"tests\"")], ""),
    });
    let config = login(&fixture, proxy.address(), r#"{"auth":"dXNlcjpzZWNyZXQ="}"#);
    pull(&fixture, &proxy, Some(config)).unwrap();
    assert_eq!(proxy.requests()[0].header("authorization"), None);
}

#[test]
fn a_refusal_says_what_to_do_and_is_not_repeated() {
    let fixture = Fixture::new();
    let proxy = with_tokens(&fixture, |_| None, |_| false);
    let config = login(&fixture, proxy.address(), r#"{"username":"user","password":"wrong"}"#);
    for config in [None, Some(config)] {
        let before = proxy.requests().len();
        let error = pull(&fixture, &proxy, config).unwrap_err();
        let is_unauthorized = matches!(&error, Error::Pull { source, .. }
            if matches!(**source, registry::Error::Unauthorized { .. }));
        assert!(is_unauthorized, "{error:?}");
        assert!(
            chain(&error).contains("docker login") && !chain(&error).contains("wrong"),
            "{}",
            chain(&error)
        );
        assert_eq!(proxy.requests().len() - before, 2, "the manifest and the token");
    }
}

#[test]
fn a_password_does_not_go_to_a_token_server_in_the_clear() {
    let fixture = Fixture::new();
    let other = fixture.proxy(|_| Reaction::status(200, &[], r#"{"token":"x"}"#));
    let realm = format!("Bearer realm=\"http://{}/token\"", other.address());
    let proxy = fixture.proxy(move |_| Reaction::status(401, &[("www-authenticate", &realm)], ""));
    let config = login(&fixture, proxy.address(), r#"{"username":"user","password":"secret"}"#);
    let error = pull(&fixture, &proxy, Some(config)).unwrap_err();
    assert!(chain(&error).contains("wants its tokens fetched from"), "{}", chain(&error));
    assert!(other.requests().is_empty());
}

#[test]
fn a_token_server_that_talks_nonsense_is_a_typed_error() {
    let fixture = Fixture::new();
    for answer in ["", "{}", r#"{"token":""}"#, "{\"token\":\"a\\nb\"}", &"x".repeat(1 << 20)] {
        let answer = answer.to_owned();
        let proxy = fixture.proxy(move |request| {
            if request.path.starts_with("/token") {
                return Reaction::status(200, &[], &answer);
            }
            let realm = format!("Bearer realm=\"http://{}/token\"", request.header("host").unwrap());
            Reaction::status(401, &[("www-authenticate", &realm)], "")
        });
        let error = pull(&fixture, &proxy, None).unwrap_err();
        let is_typed = matches!(&error, Error::Pull { source, .. }
            if matches!(**source, registry::Error::Token { .. } | registry::Error::TooLarge { .. }));
        assert!(is_typed, "{error:?}");
    }
}
