//! Which snapshot a template's name leads to. A name moves when its template is built anew; the old snapshot stays beside it.

use std::collections::BTreeMap;

use imp_runtime::Digest;
use serde::{Deserialize, Serialize};

use crate::layout::Layout;
use crate::name::TemplateName;
use crate::records::{Error, Records};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    name: TemplateName,
    snapshot: Digest,
}

#[derive(Debug)]
pub(crate) struct TemplateNames(Records<Record>);

impl TemplateNames {
    pub(crate) fn of(layout: &Layout) -> Self {
        Self(Records::new(layout.template_names()))
    }

    /// The name leads there, and nowhere else, from now on.
    pub(crate) fn lead(&self, name: &TemplateName, snapshot: &Digest) -> Result<(), Error> {
        self.0.write(name.as_str(), &Record { name: name.clone(), snapshot: *snapshot })
    }

    /// Of a text that is no name: none.
    pub(crate) fn find(&self, text: &str) -> Result<Option<Digest>, Error> {
        let Ok(name) = text.parse::<TemplateName>() else { return Ok(None) };
        Ok(self.0.read(name.as_str())?.map(|record| record.snapshot))
    }

    /// All names, by what they lead to, in order.
    pub(crate) fn by_snapshot(&self) -> Result<BTreeMap<Digest, Vec<String>>, Error> {
        let mut names: BTreeMap<Digest, Vec<String>> = BTreeMap::new();
        for record in self.0.all()? {
            names.entry(record.snapshot).or_default().push(record.name.into());
        }
        names.values_mut().for_each(|names| names.sort_unstable());
        Ok(names)
    }

    /// Forgets all names of a snapshot that is gone.
    pub(crate) fn forget(&self, snapshot: &Digest) -> Result<(), Error> {
        for name in self.by_snapshot()?.remove(snapshot).unwrap_or_default() {
            self.0.remove(&name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_moves_and_goes_with_its_last_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout { data: folder.path().to_owned(), runtime: "/run".into() };
        let names = TemplateNames::of(&layout);
        let (one, two) = (Digest::of(b"1"), Digest::of(b"2"));
        let name = |text: &str| text.parse::<TemplateName>().unwrap();
        assert_eq!(names.find("py").unwrap(), None);
        names.lead(&name("py"), &one).unwrap();
        names.lead(&name("also"), &one).unwrap();
        names.lead(&name("py"), &two).unwrap();
        assert_eq!((names.find("py").unwrap(), names.find("also").unwrap()), (Some(two), Some(one)));
        names.forget(&one).unwrap();
        assert_eq!((names.find("py").unwrap(), names.find("also").unwrap()), (Some(two), None));
        assert_eq!(names.find("../py").unwrap(), None);
    }
}
