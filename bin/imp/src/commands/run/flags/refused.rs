//! Why a VM that goes on from a snapshot is not given what only a boot, or a preparation, could give it.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

const PROGRAM: &str =
    "the image and the program are the template's; build another template for another program";
const MACHINE: &str =
    "a machine that goes on from a snapshot is what it was then; build another template with this flag";
const COPIES: &str = "-v and --mount copy before the program starts, and this one runs already; use `imp cp`";
const TERMINAL: &str =
    "the program runs already, with a terminal or without one; `imp exec -t` starts another";
const PREPARED: &str =
    "the network of a pool's VM was made when it was prepared; use --template, which makes a VM of your own";

/// Says in an error about flags that exclude each other why they do, where it is not plain.
pub(crate) fn explain(mut error: clap::Error) -> clap::Error {
    if error.kind() == ErrorKind::ArgumentConflict
        && let Some(why) = why(&named(&error))
    {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(why)]));
    }
    error
}

/// The flags that exclude each other, without what stands for their values.
fn named(error: &clap::Error) -> Vec<String> {
    let of = |kind| match error.get(kind) {
        Some(ContextValue::String(one)) => vec![one.clone()],
        Some(ContextValue::Strings(several)) => several.clone(),
        Some(_) | None => Vec::new(),
    };
    let all = of(ContextKind::InvalidArg).into_iter().chain(of(ContextKind::PriorArg));
    all.map(|text| text.split(' ').next().unwrap_or_default().to_owned()).collect()
}

fn why(named: &[String]) -> Option<&'static str> {
    let is = |flags: &[&str]| named.iter().any(|name| flags.contains(&name.as_str()));
    if !is(&["--template", "--pool"]) || is(&["--secret"]) || (is(&["--template"]) && is(&["--pool"])) {
        return None;
    }
    Some(if named.iter().any(|name| name.starts_with("<IMAGE") || name.starts_with("[IMAGE")) {
        PROGRAM
    } else if is(&["--volume", "--mount"]) {
        COPIES
    } else if is(&["--tty"]) {
        TERMINAL
    } else if is(&["--egress", "--allow", "--deny", "--ipv6"]) {
        PREPARED
    } else {
        MACHINE
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Arguments;

    #[test]
    fn what_a_vm_of_a_snapshot_is_not_given_is_refused_by_name_and_with_the_reason() {
        for (line, flag, reason) in [
            ("imp run --pool p --egress deny", "--egress", PREPARED),
            ("imp run --pool p --allow example.com", "--allow", PREPARED),
            ("imp run --pool p --deny 10.0.0.0/8", "--deny", PREPARED),
            ("imp run --ipv6 --pool p", "--ipv6", PREPARED),
            ("imp run --pool p -m 1g", "--memory", MACHINE),
            ("imp run --cpus 2 --pool p", "--cpus", MACHINE),
            ("imp run --template t --network none", "--network", MACHINE),
            ("imp run --template t -v ./a:/b", "--volume", COPIES),
            ("imp run --pool p -t", "--tty", TERMINAL),
            ("imp run --template t image", "IMAGE", PROGRAM),
        ] {
            let error = Arguments::try_parse_from(line.split(' ')).expect_err(line);
            let text = explain(error).to_string();
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.contains(flag) && text.contains(reason), "{line}: {text}");
        }
        let plain = Arguments::try_parse_from("imp run --template t --pool p".split(' ')).unwrap_err();
        assert!(!explain(plain).to_string().contains("tip:"));
    }
}
