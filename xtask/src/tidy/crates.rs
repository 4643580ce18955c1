//! Which crate may depend on which: the arrows of ARCHITECTURE.md.

use serde_json::Value;

use super::Finding;

/// Every crate of the workspace, and the ones of it that it uses, and may use. Tests may use `imp-testkit` besides.
const ARROWS: &[(&str, &[&str])] = &[
    ("imp-sys", &[]),
    ("imp-protocol", &[]),
    ("imp-storage", &["imp-sys"]),
    ("imp-network", &["imp-sys"]),
    ("imp-runtime", &["imp-storage", "imp-network", "imp-protocol", "imp-sys"]),
    ("imp-embedded", &["imp-runtime", "imp-protocol", "imp-sys"]),
    ("imp-cli", &["imp-embedded", "imp-runtime", "imp-storage", "imp-protocol", "imp-sys"]),
    ("imp-husk", &["imp-runtime", "imp-protocol", "imp-sys"]),
    ("imp-guest-agent", &["imp-protocol", "imp-sys"]),
    ("imp-testkit", &["imp-testkit-node", "imp-sys"]),
    ("imp-testkit-node", &["imp-sys"]),
    ("imp-tests", &["imp-testkit"]),
    ("imp-bench", &["imp-testkit", "imp-runtime", "imp-storage", "imp-protocol"]),
    ("imp-demo", &["imp-testkit"]),
    ("xtask", &[]),
];

/// Crates from outside that only these may use.
const KEPT: &[(&str, &[&str])] = &[("libc", &["imp-sys"]), ("kube", &[])];

/// `metadata`: what `cargo metadata --no-deps` prints.
pub(super) fn check(metadata: &Value) -> Vec<Finding> {
    let packages = metadata.get("packages").and_then(Value::as_array).into_iter().flatten();
    packages.flat_map(check_package).collect()
}

fn check_package(package: &Value) -> Vec<Finding> {
    let name = text(package, "name");
    let manifest = format!("the manifest of {name}");
    let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
        return vec![Finding::new(
            &manifest,
            0,
            "this crate has no row in the table of xtask's tidy/crates.rs: say there what it may depend on",
        )];
    };
    let dependencies = package.get("dependencies").and_then(Value::as_array).into_iter().flatten();
    let wrong = dependencies.filter_map(|dependency| {
        let on = text(dependency, "name");
        let for_tests = text(dependency, "kind") == "dev";
        let ours = dependency.get("path").is_some_and(Value::is_string);
        let fine = match (ours, KEPT.iter().find(|(kept, _)| *kept == on)) {
            (true, _) => allowed.contains(&on) || (for_tests && on == "imp-testkit"),
            (false, Some((_, users))) => users.contains(&name),
            (false, None) => true,
        };
        (!fine).then(|| Finding::new(&manifest, 0, format!("{name} may not depend on {on}")))
    });
    let on = |wanted: &str| names(package).any(|name| name == wanted);
    let unused = allowed.iter().filter(|allowed| !on(allowed)).map(|allowed| {
        Finding::new(
            &manifest,
            0,
            format!(
                "{name} does not depend on {allowed}: take that out of the table of xtask's tidy/crates.rs"
            ),
        )
    });
    wrong.chain(unused).collect()
}

fn names(package: &Value) -> impl Iterator<Item = &str> {
    let dependencies = package.get("dependencies").and_then(Value::as_array).into_iter().flatten();
    dependencies.map(|dependency| text(dependency, "name"))
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(package: &str, dependencies: Value) -> Vec<String> {
        let metadata = json!({ "packages": [{ "name": package, "dependencies": dependencies }] });
        check(&metadata).into_iter().map(|finding| finding.problem).collect()
    }

    /// Without arrows that are missing.
    fn wrong(package: &str, dependencies: Value) -> Vec<String> {
        let mut found = problems(package, dependencies);
        found.retain(|problem| problem.contains("may not"));
        found
    }

    #[test]
    fn an_arrow_that_points_up_is_found() {
        let up = json!([{ "name": "imp-runtime", "path": "lib/runtime", "kind": null }]);
        assert_eq!(wrong("imp-storage", up.clone()), ["imp-storage may not depend on imp-runtime"]);
        assert!(wrong("imp-embedded", up).is_empty());
    }

    #[test]
    fn the_testkit_is_for_tests() {
        let dependency =
            |kind: Value| json!([{ "name": "imp-testkit", "path": "lib/testkit", "kind": kind }]);
        assert!(wrong("imp-storage", dependency(json!("dev"))).is_empty());
        assert_eq!(wrong("imp-storage", dependency(Value::Null)).len(), 1);
    }

    #[test]
    fn a_kept_crate_is_found_where_it_does_not_belong() {
        let dependency = json!([{ "name": "libc", "path": null, "kind": null }]);
        assert!(problems("imp-sys", dependency.clone()).is_empty());
        assert_eq!(wrong("imp-runtime", dependency), ["imp-runtime may not depend on libc"]);
    }

    #[test]
    fn an_arrow_that_nothing_needs_is_found() {
        let found = problems("imp-network", json!([]));
        assert!(matches!(found.as_slice(), [one] if one.contains("does not depend on imp-sys")), "{found:?}");
    }

    #[test]
    fn a_crate_without_a_row_is_found() {
        assert_eq!(problems("imp-new", json!([])).len(), 1);
    }
}
