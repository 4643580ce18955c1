//! One repository at one server: requests that answer its challenges.

use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::WWW_AUTHENTICATE;
use reqwest::{Response, StatusCode, Url};
use serde::Deserialize;

use super::challenge::{self, Challenge};
use super::credentials::{self, Credentials, Secret};
use super::endpoint::{Endpoint, is_allowed};
use super::error::Error;
use super::transport::{Answer, Get, Send, Transport, host};

/// Largest answer of a token server, bytes.
const LARGEST_TOKEN: u64 = 64 << 10;
const CLIENT_ID: &str = "imp";

pub(super) struct Session {
    transport: Arc<Transport>,
    endpoint: Endpoint,
    repository: String,
    access: Access,
    /// The value of the Authorization header that the server took last.
    authorization: Mutex<Option<Secret>>,
}

/// What is done in the repository: a token is asked for that allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Pull,
    Push,
}

impl Access {
    fn actions(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "pull,push",
        }
    }
}

#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<Secret>,
    access_token: Option<Secret>,
}

impl Session {
    pub(super) fn new(
        transport: Arc<Transport>,
        endpoint: Endpoint,
        repository: &str,
        access: Access,
    ) -> Self {
        let (repository, authorization) = (repository.to_owned(), Mutex::new(None));
        Self { transport, endpoint, repository, access, authorization }
    }

    pub(super) fn host(&self) -> &str {
        &self.endpoint.host
    }

    pub(super) fn transport(&self) -> &Transport {
        &self.transport
    }

    /// Asks for something of the repository, such as `blobs/<digest>`. The answer is a success; all else is an error.
    pub(super) async fn get(&self, what: &str, accept: Option<&str>, from: u64) -> Result<Response, Error> {
        let url = self.url(what)?;
        self.authorized(async |authorization| {
            self.transport.get(url.clone(), &Get { accept, from, authorization }).await
        })
        .await
    }

    /// Changes something of the repository, or asks whether it is there. Redirects are not followed.
    pub(super) async fn send(&self, request: &Send<'_>, to: Url) -> Result<Response, Error> {
        // What a server names is asked with credentials only if it is the server itself.
        let is_own = to.origin() == self.url("")?.origin();
        self.authorized(async |authorization| {
            let response =
                self.transport.send_to(to.clone(), request, authorization.filter(|_| is_own)).await?;
            Ok(Answer { response, redirected: !is_own })
        })
        .await
    }

    /// The address of something of the repository.
    pub(super) fn url(&self, what: &str) -> Result<Url, Error> {
        parse(&self.endpoint.url(&format!("/v2/{}/{what}", self.repository)))
    }

    async fn authorized(
        &self,
        ask: impl AsyncFn(Option<&Secret>) -> Result<Answer, Error>,
    ) -> Result<Response, Error> {
        let known = self.known();
        let first = ask(known.as_ref()).await?;
        let Some(challenges) = challenges(&first) else { return self.success(first).await };
        // Without a token yet, or with one that has expired: answer the challenge, once.
        let Some(authorization) = self.answer(&challenges).await? else { return Err(self.unauthorized()) };
        let second = ask(Some(&authorization)).await?;
        if challenges_again(&second) {
            return Err(self.unauthorized());
        }
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(authorization);
        self.success(second).await
    }

    async fn success(&self, answer: Answer) -> Result<Response, Error> {
        match answer.response.status() {
            status if status.is_success() => Ok(answer.response),
            StatusCode::FORBIDDEN if !answer.redirected => Err(self.unauthorized()),
            _ => Err(self.transport.refusal(answer.response).await),
        }
    }

    fn known(&self) -> Option<Secret> {
        self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn unauthorized(&self) -> Error {
        let (host, repository) = (self.endpoint.host.clone(), self.repository.clone());
        match self.access {
            Access::Pull => Error::Unauthorized { host, repository },
            Access::Push => Error::MayNotPush { host, repository },
        }
    }

    /// The Authorization header that answers a challenge; None if there are no credentials that could.
    async fn answer(&self, challenges: &[Challenge]) -> Result<Option<Secret>, Error> {
        let config = self.transport.settings().docker_config.as_deref();
        let credentials = credentials::find(config, &self.endpoint.credentials_key).await?;
        let bearer = challenges.iter().find(|challenge| matches!(challenge, Challenge::Bearer { .. }));
        match (bearer, challenges.contains(&Challenge::Basic), credentials) {
            (Some(_), _, Credentials::RegistryToken(token)) => Ok(Some(bearer_header(&token))),
            (Some(Challenge::Bearer { realm, service, scope }), _, credentials) => {
                let token =
                    self.fetch_token(realm, service.as_deref(), scope.as_deref(), &credentials).await?;
                Ok(Some(bearer_header(&token)))
            }
            (_, true, Credentials::Password { user, password }) => Ok(Some(basic_header(&user, &password))),
            _ => Ok(None),
        }
    }

    async fn fetch_token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: Option<&str>,
        credentials: &Credentials,
    ) -> Result<Secret, Error> {
        let mut url = parse(realm)?;
        if !is_allowed(&url, self.transport.settings()) {
            let realm = format!("{}://{}", url.scheme(), host(&url));
            return Err(Error::Realm { host: self.endpoint.host.clone(), realm });
        }
        let own_scope = format!("repository:{}:{}", self.repository, self.access.actions());
        // A first question that only reads is challenged for reading only.
        let scope = scope.filter(|_| self.access == Access::Pull).unwrap_or(&own_scope);
        let mut query = vec![("scope", scope)];
        query.extend(service.map(|service| ("service", service)));
        let response = match credentials {
            Credentials::Identity(identity) => {
                query.extend([
                    ("grant_type", "refresh_token"),
                    ("client_id", CLIENT_ID),
                    ("refresh_token", identity.expose()),
                ]);
                self.transport.post_form(url.clone(), &query).await?
            }
            Credentials::Password { user, password } => {
                url.query_pairs_mut().extend_pairs(query).append_pair("account", user);
                let authorization = basic_header(user, password);
                let get = Get { authorization: Some(&authorization), ..Get::default() };
                self.transport.get(url.clone(), &get).await?.response
            }
            Credentials::Anonymous | Credentials::RegistryToken(_) => {
                url.query_pairs_mut().extend_pairs(query);
                self.transport.get(url.clone(), &Get::default()).await?.response
            }
        };
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(self.unauthorized()),
            _ => return Err(self.transport.refusal(response).await),
        }
        let body = self.transport.read(response, LARGEST_TOKEN).await?;
        let answer: Option<TokenAnswer> = serde_json::from_slice(&body).ok();
        let token = answer.and_then(|answer| answer.token.or(answer.access_token));
        token.filter(is_header_safe).ok_or_else(|| Error::Token { host: host(&url) })
    }
}

/// The challenges of a server that wants to know who asks; a server that was redirected to has no say in this.
fn challenges(answer: &Answer) -> Option<Vec<Challenge>> {
    challenges_again(answer).then(|| {
        let headers = answer.response.headers().get_all(WWW_AUTHENTICATE);
        headers.iter().filter_map(|header| header.to_str().ok()).flat_map(challenge::parse).collect()
    })
}

fn challenges_again(answer: &Answer) -> bool {
    answer.response.status() == StatusCode::UNAUTHORIZED && !answer.redirected
}

fn parse(text: &str) -> Result<Url, Error> {
    let url = Url::parse(text).map_err(|_| Error::Address(text.chars().take(200).collect()))?;
    if url.has_host() { Ok(url) } else { Err(Error::Address(text.chars().take(200).collect())) }
}

fn bearer_header(token: &Secret) -> Secret {
    Secret::new(format!("Bearer {}", token.expose()))
}

fn basic_header(user: &str, password: &Secret) -> Secret {
    Secret::new(format!("Basic {}", STANDARD.encode(format!("{user}:{}", password.expose()))))
}

fn is_header_safe(token: &Secret) -> bool {
    !token.expose().is_empty() && token.expose().bytes().all(|byte| byte.is_ascii_graphic())
}
