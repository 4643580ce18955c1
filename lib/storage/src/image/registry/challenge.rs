//! `WWW-Authenticate`: what a registry wants to see before it answers (RFC 9110, section 11.6.1).

/// Longest header that is looked at, bytes.
const LONGEST: usize = 16 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    /// A token from the server at `realm`.
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
    /// User name and password.
    Basic,
}

/// The challenges of one header that are understood, in its order.
pub(super) fn parse(header: &str) -> Vec<Challenge> {
    let mut found = Vec::new();
    if header.len() > LONGEST {
        return found;
    }
    let mut current: Option<(String, Vec<(String, String)>)> = None;
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if rest.is_empty() {
            break;
        }
        let (word, after) = token(rest);
        if word.is_empty() {
            break;
        }
        let after_space = after.trim_start_matches([' ', '\t']);
        match (after_space.strip_prefix('='), &mut current) {
            // A name followed by a value belongs to the scheme before it.
            (Some(value), Some((_, parameters))) if !after_space.starts_with("==") => {
                let Some((value, after)) = parameter_value(value.trim_start_matches([' ', '\t'])) else {
                    break;
                };
                parameters.push((word.to_ascii_lowercase(), value));
                rest = after;
            }
            (Some(_), _) => break,
            (None, _) => {
                found.extend(current.take().and_then(understand));
                current = Some((word.to_ascii_lowercase(), Vec::new()));
                rest = after;
            }
        }
    }
    found.extend(current.and_then(understand));
    found
}

fn understand((scheme, parameters): (String, Vec<(String, String)>)) -> Option<Challenge> {
    let value = |name: &str| {
        let found = parameters.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.clone()).filter(|value| !value.is_empty())
    };
    match scheme.as_str() {
        "bearer" => Some(Challenge::Bearer {
            realm: value("realm")?,
            service: value("service"),
            scope: value("scope"),
        }),
        "basic" => Some(Challenge::Basic),
        _ => None,
    }
}

fn token(text: &str) -> (&str, &str) {
    let is_token = |letter: char| letter.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(letter);
    text.split_at(text.find(|letter| !is_token(letter)).unwrap_or(text.len()))
}

fn parameter_value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = token(text);
        return Some((value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut letters = quoted.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, quoted.get(at + 1..)?)),
            '\\' => value.push(letters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Challenge {
        let own = |text: Option<&str>| text.map(str::to_owned);
        Challenge::Bearer { realm: realm.into(), service: own(service), scope: own(scope) }
    }

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        for (header, expected) in [
            (
                r#"Bearer realm="https://h/token",service="s",scope="repository:a/b:pull,push""#,
                vec![bearer("https://h/token", Some("s"), Some("repository:a/b:pull,push"))],
            ),
            (r#"bearer  Realm = "https://h/t" , service=s"#, vec![bearer("https://h/t", Some("s"), None)]),
            (r#"Basic realm="Registry Realm""#, vec![Challenge::Basic]),
            ("BASIC", vec![Challenge::Basic]),
            (
                r#"Negotiate, Basic realm="x", Bearer realm="r\"q",service="""#,
                vec![Challenge::Basic, bearer("r\"q", None, None)],
            ),
            (r#"Bearer service="s""#, vec![]),
            (r#"Bearer realm="never ends"#, vec![]),
            ("Negotiate dG9rZW4==", vec![]),
            ("", vec![]),
        ] {
            assert_eq!(parse(header), expected, "{header}");
        }
    }

    proptest! {
        #[test]
        fn no_header_makes_the_parser_panic(header in "\\PC{0,80}") {
            parse(&header);
        }

        #[test]
        fn no_header_of_the_right_letters_makes_the_parser_panic(header in "[Bbearic=\", \\\\xé]{0,60}") {
            parse(&header);
        }
    }
}
