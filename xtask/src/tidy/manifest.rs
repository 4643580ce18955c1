//! The table of dependencies: each line says why it is there.

use super::{Finding, Source};

pub(super) fn check(manifest: &Source) -> Vec<Finding> {
    let mut within = false;
    let mut findings = Vec::new();
    for (number, line) in manifest.text.lines().enumerate() {
        if line.starts_with('[') {
            within = line == "[workspace.dependencies]";
            continue;
        }
        let Some((name, rest)) = line.split_once(" = ") else { continue };
        if within && !name.starts_with('#') && !rest.contains("path = ") && !rest.contains(" # ") {
            let problem =
                format!("the dependency {name} does not say why it is there: end the line with `# reason`");
            findings.push(Finding::new(&manifest.path, number + 1, problem));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_without_a_reason_is_found() {
        let text = "[workspace.dependencies]\nimp-sys = { path = \"lib/sys\" }\nbytes = \"1\" # buffers\nhex = \"0.4\"\n\
                    [profile.dev]\ndebug = false\n";
        let findings = check(&Source { path: "Cargo.toml".into(), text: text.into() });
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].line, 4);
    }
}
