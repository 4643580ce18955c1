//! Errors as text, as one of our processes tells another, a record or a log of them.

use std::error::Error;

/// An error and its causes in one line, outermost first.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn every_cause_is_told_once() {
        assert_eq!(chain(&Outer(std::io::Error::other("inner"))), "outer: inner");
    }
}
