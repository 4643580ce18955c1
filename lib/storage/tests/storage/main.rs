//! The store against a real registry: what it gets, what it survives, and what it never does.

#[cfg(test)]
mod crash;
#[cfg(test)]
mod credentials;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod import;
#[cfg(test)]
mod network;
#[cfg(test)]
mod pull;
#[cfg(test)]
mod store;
