//! Puts a guest to sleep for a snapshot, and wakes the machine that goes on from it.
//!
//! ```text
//! sleep ─► snapshot ─┬─► the same machine: wake(Same)
//!                    └─► each machine made of it: resume ─► greet ─► wake(New) ─► served, or ended
//! ```

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::repair::Kind;
use imp_protocol::guest::restore_client::RestoreClient;
use imp_protocol::guest::{
    HostEntry, NetworkInterface, SameMachine, SleepRequest, WakeRequest, WakeResponse, wake_request,
};

use super::{call, call_within, unix_nanoseconds};
use crate::lifecycle::FALL_ASLEEP;
use crate::random;
use crate::spec::{Environment, HostName};

/// Bytes of entropy that a new machine is given.
const ENTROPY: usize = 64;
/// How far the guest's wall clock may be from the host's.
const CLOCK: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Call(#[from] super::Error),
    /// A machine that must not be served.
    #[error("the restored guest cannot be used: its {repair} was not repaired: {why}")]
    NotRepaired { repair: RepairKind, why: String },
    #[error("the restored guest cannot be used: its processes ran before it was repaired")]
    RanUnrepaired,
    #[error("the restored guest cannot be used: its clock is {} ms away from the host's", away.as_millis())]
    Clock { away: Duration },
}

/// What tells a machine from all others that were ever made; user-space generators watch it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Generation(String);

impl Generation {
    pub(crate) fn from_random(bytes: [u8; 16]) -> Self {
        Self(format!("{:032x}", u128::from_be_bytes(bytes)))
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What /etc/machine-id holds: never all zero, which means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MachineId(u128);

impl MachineId {
    /// A random id of the form that systemd makes: a UUID of version 4.
    pub(crate) fn from_random(bytes: [u8; 16]) -> Self {
        let number = u128::from_be_bytes(bytes);
        Self(number & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62))
    }
}

impl fmt::Display for MachineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// As what a machine wakes.
#[derive(Debug, Clone)]
pub(crate) enum Wake {
    /// As the one that was put to sleep.
    Same,
    New(Box<NewMachine>),
}

/// What a machine that is made of a snapshot is told. The same generation may be sent again, when an answer was lost.
#[derive(Debug, Clone)]
pub(crate) struct NewMachine {
    pub(crate) generation: Generation,
    pub(crate) hostname: HostName,
    pub(crate) machine_id: MachineId,
    /// None: the network stays as it is in the snapshot.
    pub(crate) network: Option<NetworkInterface>,
    pub(crate) hosts: Vec<HostEntry>,
    pub(crate) environment: Environment,
    pub(crate) secrets: Environment,
}

/// A machine that is awake and may be served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Woken {
    /// What was repaired, in the guest's order, and how long each took there.
    pub(crate) done: Vec<(RepairKind, Duration)>,
    /// What was tried in vain and is not essential, and why.
    pub(crate) failed: Vec<(RepairKind, String)>,
    /// Processes that run again.
    pub(crate) processes: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RepairKind {
    Entropy,
    Clock,
    Identity,
    Network,
    Connections,
    Generation,
    Environment,
    Hooks,
}

impl RepairKind {
    fn of(kind: Kind) -> Option<Self> {
        Some(match kind {
            Kind::Unknown => return None,
            Kind::Entropy => Self::Entropy,
            Kind::Clock => Self::Clock,
            Kind::Identity => Self::Identity,
            Kind::Network => Self::Network,
            Kind::Connections => Self::Connections,
            Kind::Generation => Self::Generation,
            Kind::Environment => Self::Environment,
            Kind::Hooks => Self::Hooks,
        })
    }
}

impl RepairKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Entropy => "entropy",
            Self::Clock => "clock",
            Self::Identity => "identity",
            Self::Network => "network",
            Self::Connections => "connections",
            Self::Generation => "generation",
            Self::Environment => "environment",
            Self::Hooks => "hooks",
        }
    }
}

impl fmt::Display for RepairKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Freezes the guest's processes; returns how many. `at_most`: after this the guest lets them run again by itself, because
/// its host must be gone. None: never, for a snapshot whose parent has no life after it. A machine made of the snapshot
/// has only what was left of that time to be woken.
pub(crate) async fn sleep(connection: &Connection, at_most: Option<Duration>) -> Result<u32, super::Error> {
    let at_most_milliseconds =
        at_most.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1));
    let request = SleepRequest { at_most_milliseconds };
    let answer =
        call_within(FALL_ASLEEP, "Sleep", RestoreClient::new(connection.clone()).sleep(request)).await?;
    Ok(answer.frozen)
}

/// Wakes the guest. An error of [`Wake::New`] means that the machine must not be served.
pub(crate) async fn wake(connection: &Connection, wake: &Wake) -> Result<Woken, Error> {
    let request = WakeRequest { r#as: Some(request(wake)), unix_time_nanoseconds: unix_nanoseconds() };
    let sent = request.unix_time_nanoseconds;
    let answer = call("Wake", RestoreClient::new(connection.clone()).wake(request)).await?;
    judge(wake, answer, sent, unix_nanoseconds())
}

fn request(wake: &Wake) -> wake_request::As {
    let machine = match wake {
        Wake::Same => return wake_request::As::Same(SameMachine {}),
        Wake::New(machine) => machine,
    };
    let variables =
        |variables: &Environment| variables.expose().iter().map(|v| Bytes::copy_from_slice(v)).collect();
    wake_request::As::New(imp_protocol::guest::NewMachine {
        generation: machine.generation.to_string(),
        entropy: random::bytes::<ENTROPY>().to_vec().into(),
        hostname: machine.hostname.as_str().to_owned(),
        machine_id: machine.machine_id.to_string(),
        network: machine.network.clone(),
        hosts: machine.hosts.clone(),
        environment: variables(&machine.environment),
        secrets: variables(&machine.secrets),
    })
}

/// Without which a machine is not served.
fn required(wake: &Wake) -> Vec<RepairKind> {
    let machine = match wake {
        Wake::Same => return vec![RepairKind::Clock],
        Wake::New(machine) => machine,
    };
    let mut required = vec![RepairKind::Entropy, RepairKind::Clock, RepairKind::Identity];
    required.extend(machine.network.is_some().then_some(RepairKind::Network));
    let variables = machine.environment.expose().len() + machine.secrets.expose().len();
    required.extend((variables > 0).then_some(RepairKind::Environment));
    required
}

/// Whether the answer allows to serve the machine. `sent` and `now`: the host's clock when it asked, and when the answer
/// came.
fn judge(wake: &Wake, answer: WakeResponse, sent: u64, now: u64) -> Result<Woken, Error> {
    let mut woken = Woken { processes: answer.thawed, ..Woken::default() };
    for repair in answer.repairs {
        // What a newer agent repairs besides is no concern of this host.
        let Some(kind) = RepairKind::of(repair.kind()) else { continue };
        if repair.failed.is_empty() {
            woken.done.push((kind, Duration::from_nanos(repair.nanoseconds)));
        } else {
            woken.failed.push((kind, repair.failed));
        }
    }
    for repair in required(wake) {
        if let Some((_, why)) = woken.failed.iter().find(|(kind, _)| *kind == repair) {
            return Err(Error::NotRepaired { repair, why: why.clone() });
        }
        if !woken.done.iter().any(|(kind, _)| *kind == repair) {
            return Err(Error::NotRepaired { repair, why: "the guest does not say that it was".to_owned() });
        }
    }
    // Its main process stood still, at least.
    if matches!(wake, Wake::New(_)) && woken.processes == 0 {
        return Err(Error::RanUnrepaired);
    }
    let guest = answer.unix_time_nanoseconds;
    let away = Duration::from_nanos(sent.saturating_sub(guest).max(guest.saturating_sub(now)));
    if away > CLOCK {
        return Err(Error::Clock { away });
    }
    Ok(woken)
}

#[cfg(test)]
mod tests {
    use imp_protocol::guest::Repair;

    use super::*;

    const NOW: u64 = 1_800_000_000_000_000_000;
    const SECOND: u64 = 1_000_000_000;

    fn new_machine() -> NewMachine {
        NewMachine {
            generation: Generation::from_random([7; 16]),
            hostname: "one".parse().unwrap(),
            machine_id: MachineId::from_random([0xff; 16]),
            network: None,
            hosts: Vec::new(),
            environment: Environment::default(),
            secrets: Environment::default(),
        }
    }

    fn answer(failed: Option<Kind>, left_out: Option<Kind>) -> WakeResponse {
        let kinds = [
            Kind::Entropy,
            Kind::Clock,
            Kind::Identity,
            Kind::Network,
            Kind::Connections,
            Kind::Generation,
            Kind::Environment,
            Kind::Hooks,
        ];
        let repairs = kinds.into_iter().filter(|kind| Some(*kind) != left_out).map(|kind| Repair {
            kind: kind.into(),
            failed: if Some(kind) == failed { "broken".to_owned() } else { String::new() },
            nanoseconds: 5,
        });
        WakeResponse { repairs: repairs.collect(), thawed: 2, unix_time_nanoseconds: NOW }
    }

    fn judged(machine: NewMachine, answer: WakeResponse) -> Result<Woken, Error> {
        judge(&Wake::New(Box::new(machine)), answer, NOW - SECOND, NOW + SECOND)
    }

    #[test]
    fn a_machine_whose_entropy_clock_or_identity_is_not_confirmed_is_not_served() {
        for kind in [Kind::Entropy, Kind::Clock, Kind::Identity] {
            for answer in [answer(Some(kind), None), answer(None, Some(kind))] {
                let error = judged(new_machine(), answer).unwrap_err();
                assert!(
                    matches!(error, Error::NotRepaired { repair, .. } if Some(repair) == RepairKind::of(kind))
                );
            }
        }
    }

    #[test]
    fn network_and_environment_are_required_when_they_are_asked_for() {
        for kind in [Kind::Network, Kind::Environment] {
            let woken = judged(new_machine(), answer(Some(kind), None)).unwrap();
            assert_eq!(woken.failed, [(RepairKind::of(kind).unwrap(), "broken".to_owned())]);
        }
        let network = NewMachine { network: Some(NetworkInterface::default()), ..new_machine() };
        assert!(judged(network, answer(Some(Kind::Network), None)).is_err());
        let secret = NewMachine { secrets: Environment::new(["A=b"]).unwrap(), ..new_machine() };
        assert!(judged(secret, answer(None, Some(Kind::Environment))).is_err());
    }

    #[test]
    fn a_machine_of_which_nothing_stood_still_until_it_was_repaired_is_not_served() {
        let ran = WakeResponse { thawed: 0, ..answer(None, None) };
        assert!(matches!(judged(new_machine(), ran.clone()), Err(Error::RanUnrepaired)));
        assert!(judge(&Wake::Same, ran, NOW, NOW).is_ok());
    }

    #[test]
    fn the_same_machine_needs_its_clock_alone() {
        let clock = Repair { kind: Kind::Clock.into(), failed: String::new(), nanoseconds: 0 };
        let answer = WakeResponse { repairs: vec![clock], thawed: 1, unix_time_nanoseconds: NOW };
        assert!(judge(&Wake::Same, answer, NOW, NOW).is_ok());
        assert!(judge(&Wake::Same, answer_of_nothing(), NOW, NOW).is_err());
    }

    fn answer_of_nothing() -> WakeResponse {
        WakeResponse { unix_time_nanoseconds: NOW, ..WakeResponse::default() }
    }

    #[test]
    fn a_clock_that_is_said_to_be_set_and_is_not_is_found_out() {
        for (away, good) in [(0, true), (3 * SECOND, true), (4 * SECOND, false)] {
            for unix_time_nanoseconds in [NOW - away, NOW + away] {
                let answer = WakeResponse { unix_time_nanoseconds, ..answer(None, None) };
                assert_eq!(judged(new_machine(), answer).is_ok(), good, "{away}");
            }
        }
    }

    #[test]
    fn generations_and_machine_ids_are_what_their_readers_expect() {
        assert_eq!(Generation::from_random([0xab; 16]).to_string(), "ab".repeat(16));
        assert_eq!(MachineId::from_random([0xff; 16]).to_string(), "ffffffffffff4fffbfffffffffffffff");
        assert_eq!(MachineId::from_random([0; 16]).to_string(), "00000000000040008000000000000000");
    }

    #[test]
    fn secrets_are_in_no_debug_output() {
        let secrets = Environment::new(["TOKEN=hunter2"]).unwrap();
        let text = format!("{:?}", Wake::New(Box::new(NewMachine { secrets, ..new_machine() })));
        assert!(!text.contains("hunter2"), "{text}");
    }
}
