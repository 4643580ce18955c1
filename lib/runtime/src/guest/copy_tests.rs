use imp_protocol::causes::chain;

use super::*;
use crate::spec::{Bytes, MountAccess};

#[test]
fn a_copy_is_told_as_in_the_way_of_something_only_when_it_is_and_always_with_both_paths() {
    let mount = CopiedMount {
        source: "/source".into(),
        target: Bytes::new("/target").unwrap(),
        access: MountAccess::ReadWrite,
    };
    let told = |status| {
        let refused = Error::Refused { call: "WriteArchive", status: Box::new(status) };
        chain(&refused.of_copy(&mount)).to_string()
    };
    let both = "/source cannot be copied to /target of the guest";
    for in_the_way in [Status::failed_precondition("why"), Status::already_exists("why")] {
        let text = told(in_the_way);
        let whole = format!("{both}, where something else is already: why; choose another GUEST-PATH");
        assert_eq!(text, whole);
    }
    for other in [Status::aborted("why"), Status::resource_exhausted("why")] {
        let text = told(other);
        assert!(text.starts_with(&format!("{both}: ")) && text.ends_with("why"), "{text}");
    }
}
