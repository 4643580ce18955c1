//! Where a repository is asked for, and over what: mirrors first, then the registry itself. Pure.

use super::settings::RegistrySettings;
use crate::image::reference::{Reference, is_domain};

/// One server that speaks the distribution API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) scheme: Scheme,
    /// Host and optional port.
    pub(super) host: String,
    /// Under what this server's credentials are kept.
    pub(super) credentials_key: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    Http,
    Https,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("settings: {0:?} is not a registry host; write HOST or HOST:PORT, without a scheme")]
pub struct BadHost(String);

impl Endpoint {
    pub(super) fn url(&self, path: &str) -> String {
        let scheme = match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        format!("{scheme}://{}{path}", self.host)
    }
}

/// The servers to ask, in order.
pub(super) fn endpoints(
    reference: &Reference,
    settings: &RegistrySettings,
) -> Result<Vec<Endpoint>, BadHost> {
    let mirrors = settings.mirrors.get(reference.domain()).map(Vec::as_slice).unwrap_or_default();
    if let Some(bad) = mirrors.iter().chain(&settings.insecure).find(|host| !is_domain(host)) {
        return Err(BadHost(bad.clone()));
    }
    let mut found: Vec<Endpoint> = mirrors
        .iter()
        .map(|host| Endpoint {
            scheme: scheme(host, settings),
            host: host.clone(),
            credentials_key: host.clone(),
        })
        .collect();
    found.push(Endpoint {
        scheme: scheme(reference.domain(), settings),
        host: reference.api_host().to_owned(),
        credentials_key: reference.credentials_key().to_owned(),
    });
    Ok(found)
}

fn scheme(host: &str, settings: &RegistrySettings) -> Scheme {
    if settings.insecure.iter().any(|insecure| insecure.eq_ignore_ascii_case(host)) {
        Scheme::Http
    } else {
        Scheme::Https
    }
}

/// Whether the settings allow a request to this address: TLS always, plain HTTP only to hosts that are named.
pub(super) fn is_allowed(url: &reqwest::Url, settings: &RegistrySettings) -> bool {
    match (url.scheme(), url.host_str()) {
        ("https", Some(_)) => true,
        ("http", Some(host)) => {
            let with_port = format!("{host}:{}", url.port_or_known_default().unwrap_or(80));
            scheme(&with_port, settings) == Scheme::Http
                || (url.port().is_none() && scheme(host, settings) == Scheme::Http)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> RegistrySettings {
        RegistrySettings {
            insecure: vec!["plain.example:5000".into(), "localhost".into(), "[::1]:80".into()],
            mirrors: [(
                "a.example".to_owned(),
                vec!["m.example".to_owned(), "plain.example:5000".to_owned()],
            )]
            .into(),
            ..RegistrySettings::default()
        }
    }

    fn urls(reference: &str) -> Vec<String> {
        let reference = reference.parse().unwrap();
        endpoints(&reference, &settings()).unwrap().iter().map(|endpoint| endpoint.url("/v2/")).collect()
    }

    #[test]
    fn mirrors_come_first_and_plain_http_only_where_it_is_named() {
        assert_eq!(
            urls("a.example/x"),
            ["https://m.example/v2/", "http://plain.example:5000/v2/", "https://a.example/v2/"]
        );
        assert_eq!(urls("plain.example:5000/x"), ["http://plain.example:5000/v2/"]);
        assert_eq!(urls("plain.example/x"), ["https://plain.example/v2/"]);
        assert_eq!(urls("localhost/x"), ["http://localhost/v2/"]);
        assert_eq!(urls("localhost:5000/x"), ["https://localhost:5000/v2/"]);
        assert_eq!(urls("127.0.0.1:5000/x"), ["https://127.0.0.1:5000/v2/"]);
    }

    #[test]
    fn a_host_that_is_none_is_refused() {
        let settings = RegistrySettings { insecure: vec!["http://x".into()], ..RegistrySettings::default() };
        let refused = endpoints(&"a.example/x".parse().unwrap(), &settings);
        assert_eq!(refused, Err(BadHost("http://x".into())));
    }

    #[test]
    fn plain_http_is_allowed_only_to_a_named_host_and_port() {
        for (url, allowed) in [
            ("https://any.example/", true),
            ("http://any.example/", false),
            ("http://plain.example:5000/x", true),
            ("http://plain.example/x", false),
            ("http://localhost/", true),
            ("http://localhost:81/", false),
            ("http://[::1]/", true),
            ("ftp://plain.example:5000/", false),
            ("file:///etc/passwd", false),
        ] {
            assert_eq!(is_allowed(&url.parse().unwrap(), &settings()), allowed, "{url}");
        }
    }
}
