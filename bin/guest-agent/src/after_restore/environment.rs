//! Variables and secrets that a machine is given when it wakes: in this process's memory, and in that of what it starts.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

/// Says which, and not what it is: it may be a secret.
#[derive(Debug, thiserror::Error)]
#[error("entry {place} of `{field}` is not NAME=value without zero bytes")]
pub(super) struct ParseError {
    field: &'static str,
    place: usize,
}

/// `NAME=value` each.
#[derive(Clone, Default)]
pub(super) struct Variables(Vec<Bytes>);

impl Variables {
    /// Environment first, so that a secret of the same name wins.
    pub(super) fn parse(environment: Vec<Bytes>, secrets: Vec<Bytes>) -> Result<Self, ParseError> {
        for (field, entries) in [("environment", &environment), ("secrets", &secrets)] {
            if let Some(place) = entries.iter().position(|entry| !is_variable(entry)) {
                return Err(ParseError { field, place });
            }
        }
        Ok(Self(environment.into_iter().chain(secrets).collect()))
    }
}

impl fmt::Debug for Variables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} variables", self.0.len())
    }
}

fn is_variable(entry: &[u8]) -> bool {
    !entry.contains(&0) && entry.iter().position(|byte| *byte == b'=').is_some_and(|place| place > 0)
}

/// What every later process gets.
#[derive(Debug, Default)]
pub(crate) struct Inherited(Mutex<Variables>);

impl Inherited {
    /// Each name once: later ones win, also over those of earlier wakes.
    pub(super) fn add(&self, new: &Variables) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut places: HashMap<Bytes, usize> =
            held.0.iter().enumerate().map(|(place, entry)| (name(entry), place)).collect();
        for entry in &new.0 {
            let place = *places.entry(name(entry)).or_insert(held.0.len());
            match held.0.get_mut(place) {
                Some(earlier) => earlier.clone_from(entry),
                None => held.0.push(entry.clone()),
            }
        }
    }

    pub(crate) fn all(&self) -> Vec<Bytes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

fn name(entry: &Bytes) -> Bytes {
    let end = entry.iter().position(|byte| *byte == b'=').unwrap_or(entry.len());
    entry.slice(..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(environment: &[&'static str], secrets: &[&'static str]) -> Result<Variables, ParseError> {
        let bytes = |words: &[&'static str]| words.iter().map(|word| Bytes::from(*word)).collect();
        Variables::parse(bytes(environment), bytes(secrets))
    }

    #[test]
    fn later_ones_win_and_earlier_wakes_are_kept() {
        let inherited = Inherited::default();
        inherited.add(&variables(&["A=1", "B=1"], &["B=secret"]).unwrap());
        assert_eq!(inherited.all(), ["A=1", "B=secret"]);
        inherited.add(&variables(&["A=2", "C="], &[]).unwrap());
        assert_eq!(inherited.all(), ["A=2", "B=secret", "C="]);
    }

    #[test]
    fn no_error_and_no_debug_output_holds_a_value() {
        for bad in ["hunter2", "=hunter2", "A=hunter2\0"] {
            let error = variables(&["A=1"], &["B=2", bad]).unwrap_err();
            assert!(matches!(error, ParseError { field: "secrets", place: 1 }));
            assert!(!format!("{error} {error:?}").contains("hunter2"));
        }
        let good = variables(&[], &["A=hunter2"]).unwrap();
        let inherited = Inherited::default();
        inherited.add(&good);
        assert!(!format!("{good:?} {inherited:?}").contains("hunter2"));
    }
}
