//! A host's request to wake, as what can be done, or what is wrong with it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use imp_protocol::guest::{ConfigureRequest, NewMachine, WakeRequest, wake_request};

use super::clock::HostTime;
use super::environment::{self, Variables};
use super::generation::{self, Generation};
use super::identity::{self, MachineId};
use crate::configure::etc::Names;
use crate::configure::network::Interface;
use crate::configure::{self, Wanted};

/// The kernel's generator has a key of half of it; a host that sends less has not understood.
const LEAST_ENTROPY: usize = 64;
const MOST_ENTROPY: usize = imp_sys::entropy::MOST;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("say as what to wake: `same` or `new`")]
    Nothing,
    #[error("`unix_time_nanoseconds` is missing")]
    NoTime,
    #[error("`entropy` must have {LEAST_ENTROPY} to {MOST_ENTROPY} bytes, not {0}")]
    Entropy(usize),
    #[error("`hostname` is missing")]
    NoHostname,
    #[error(transparent)]
    Generation(#[from] generation::ParseError),
    #[error(transparent)]
    MachineId(#[from] identity::ParseError),
    #[error(transparent)]
    Environment(#[from] environment::ParseError),
    #[error(transparent)]
    Configure(#[from] configure::Error),
}

#[derive(Debug)]
pub(super) enum Wake {
    Same,
    New(Box<Identity>),
}

/// Who the machine becomes.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) generation: Generation,
    pub(super) entropy: Bytes,
    pub(super) hostname: String,
    pub(super) names: Names,
    pub(super) machine_id: MachineId,
    pub(super) network: Option<Interface>,
    pub(super) variables: Variables,
}

pub(super) fn parse(request: WakeRequest, heard: Instant) -> Result<(Wake, HostTime), Error> {
    if request.unix_time_nanoseconds == 0 {
        return Err(Error::NoTime);
    }
    let time = HostTime { since_epoch: Duration::from_nanos(request.unix_time_nanoseconds), heard };
    let wake = match request.r#as.ok_or(Error::Nothing)? {
        wake_request::As::Same(_) => Wake::Same,
        wake_request::As::New(machine) => Wake::New(Box::new(Identity::parse(machine)?)),
    };
    Ok((wake, time))
}

impl Identity {
    fn parse(machine: NewMachine) -> Result<Self, Error> {
        if !(LEAST_ENTROPY..=MOST_ENTROPY).contains(&machine.entropy.len()) {
            return Err(Error::Entropy(machine.entropy.len()));
        }
        // What a machine is told when it boots obeys the same rules.
        let wanted = Wanted::parse(ConfigureRequest {
            hostname: machine.hostname,
            network: machine.network,
            hosts: machine.hosts,
            ..ConfigureRequest::default()
        })?;
        Ok(Self {
            generation: Generation::parse(machine.generation)?,
            entropy: machine.entropy,
            hostname: wanted.hostname.ok_or(Error::NoHostname)?,
            names: wanted.names,
            machine_id: MachineId::parse(&machine.machine_id)?,
            network: wanted.network,
            variables: Variables::parse(machine.environment, machine.secrets)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use imp_protocol::guest::{NetworkInterface, SameMachine};

    use super::*;

    fn machine() -> NewMachine {
        NewMachine {
            generation: "g-1".into(),
            entropy: vec![7; 64].into(),
            hostname: "one".into(),
            machine_id: "ab".repeat(16),
            ..NewMachine::default()
        }
    }

    fn wake(machine: NewMachine) -> Result<(Wake, HostTime), Error> {
        let request =
            WakeRequest { r#as: Some(wake_request::As::New(machine)), unix_time_nanoseconds: 1_500_000_000 };
        parse(request, Instant::now())
    }

    #[test]
    fn a_machine_s_new_identity_is_understood() {
        let (wake, time) = wake(machine()).unwrap();
        assert_eq!(time.since_epoch, Duration::from_millis(1500));
        let Wake::New(identity) = wake else { panic!("{wake:?}") };
        assert_eq!((identity.hostname.as_str(), identity.generation.as_str()), ("one", "g-1"));
        assert!(identity.network.is_none());
    }

    #[test]
    fn what_is_missing_or_makes_no_sense_is_refused_before_anything_is_done() {
        let refused = |change: fn(&mut NewMachine)| {
            let mut machine = machine();
            change(&mut machine);
            wake(machine).unwrap_err()
        };
        for length in [0, 63, 513] {
            let entropy = NewMachine { entropy: vec![7; length].into(), ..machine() };
            assert!(matches!(wake(entropy), Err(Error::Entropy(found)) if found == length));
        }
        assert!(matches!(refused(|it| it.hostname.clear()), Error::NoHostname));
        assert!(matches!(refused(|it| it.hostname = "a b".into()), Error::Configure(_)));
        assert!(matches!(refused(|it| it.generation.clear()), Error::Generation(_)));
        assert!(matches!(refused(|it| it.machine_id.clear()), Error::MachineId(_)));
        assert!(matches!(refused(|it| it.secrets = vec!["x".into()]), Error::Environment(_)));
        let network = NetworkInterface { mac: "x".into(), ..NetworkInterface::default() };
        let bad = NewMachine { network: Some(network), ..machine() };
        assert!(matches!(wake(bad), Err(Error::Configure(_))));
        let nothing = WakeRequest { r#as: None, unix_time_nanoseconds: 1 };
        assert!(matches!(parse(nothing, Instant::now()), Err(Error::Nothing)));
        let no_time =
            WakeRequest { r#as: Some(wake_request::As::Same(SameMachine {})), unix_time_nanoseconds: 0 };
        assert!(matches!(parse(no_time, Instant::now()), Err(Error::NoTime)));
    }
}
