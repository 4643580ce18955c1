//! What a further process takes over from the main one, if it is asked for.

use bytes::Bytes;
use imp_protocol::guest::ProcessSpec;

/// What the main process was started with.
#[derive(Debug)]
pub(crate) struct MainProcess {
    environment: Vec<Bytes>,
    user: String,
    working_directory: Bytes,
}

impl MainProcess {
    pub(super) fn of(spec: &ProcessSpec) -> Self {
        Self {
            environment: spec.environment.clone(),
            user: spec.user.clone(),
            working_directory: spec.working_directory.clone(),
        }
    }

    /// What the spec leaves open is as it is for the main process; of a variable's values the spec's own wins.
    pub(super) fn fill(&self, spec: &mut ProcessSpec) {
        let own = std::mem::take(&mut spec.environment);
        spec.environment = self.environment.iter().cloned().chain(own).collect();
        if spec.user.is_empty() {
            spec.user.clone_from(&self.user);
        }
        if spec.working_directory.is_empty() {
            spec.working_directory = self.working_directory.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_wins_over_what_the_main_process_has() {
        let main = MainProcess::of(&ProcessSpec {
            environment: vec!["A=main".into(), "B=main".into()],
            user: "app".into(),
            working_directory: "/srv".into(),
            ..ProcessSpec::default()
        });
        let mut open = ProcessSpec::default();
        main.fill(&mut open);
        assert_eq!((open.user.as_str(), &open.working_directory[..]), ("app", &b"/srv"[..]));
        let mut own = ProcessSpec {
            environment: vec!["A=own".into()],
            user: "0".into(),
            working_directory: "/".into(),
            ..ProcessSpec::default()
        };
        main.fill(&mut own);
        assert_eq!(own.environment, ["A=main", "B=main", "A=own"]);
        assert_eq!((own.user.as_str(), &own.working_directory[..]), ("0", &b"/"[..]));
    }
}
