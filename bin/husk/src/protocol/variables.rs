//! Variables of an environment, secrets among them: bounded, and without a form that could be printed.

use std::collections::BTreeMap;
use std::fmt;

use imp_runtime::spec::Environment;
use serde::Deserialize;

const MOST: usize = 4096;
const LONGEST_NAME: usize = 256;
const LONGEST_VALUE: usize = 128 << 10;

/// Names with their values.
#[derive(Default, Clone, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(transparent)]
pub(crate) struct Variables(BTreeMap<String, String>);

/// Neither a name nor a value is in the text: which is which is what may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("there are more than {MOST}")]
    TooMany,
    #[error("a name is empty, is longer than {LONGEST_NAME} bytes, or holds '=' or NUL")]
    Name,
    #[error("a value is longer than {LONGEST_VALUE} bytes, or holds NUL")]
    Value,
}

impl Variables {
    pub(crate) fn insert(&mut self, name: String, value: String) {
        self.0.insert(name, value);
    }

    pub(crate) fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn environment(&self) -> Result<Environment, Error> {
        if self.0.len() > MOST {
            return Err(Error::TooMany);
        }
        for (name, value) in &self.0 {
            if !(1..=LONGEST_NAME).contains(&name.len()) || name.contains(['=', '\0']) {
                return Err(Error::Name);
            }
            if value.len() > LONGEST_VALUE || value.contains('\0') {
                return Err(Error::Value);
            }
        }
        Environment::new(self.0.iter().map(|(name, value)| format!("{name}={value}")))
            .map_err(|_| Error::Name)
    }
}

impl fmt::Debug for Variables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} variables", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Variables {
        Variables(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn what_is_no_variable_is_refused() {
        assert_eq!(of(&[("A", "b=c\n")]).environment().unwrap().expose(), [b"A=b=c\n"]);
        let long = "x".repeat(LONGEST_VALUE + 1);
        for (name, value, expected) in [
            ("", "v", Error::Name),
            ("A=B", "v", Error::Name),
            ("A\0", "v", Error::Name),
            (&*"n".repeat(LONGEST_NAME + 1), "v", Error::Name),
            ("A", "v\0", Error::Value),
            ("A", &long, Error::Value),
        ] {
            assert_eq!(of(&[(name, value)]).environment().unwrap_err(), expected);
        }
        let many = Variables((0..=MOST).map(|number| (format!("N{number}"), String::new())).collect());
        assert_eq!(many.environment().unwrap_err(), Error::TooMany);
    }

    #[test]
    fn a_secret_is_in_no_debug_output() {
        assert_eq!(format!("{:?}", of(&[("TOKEN", "hunter2")])), "1 variables");
    }
}
