//! Where Firecracker is.

use std::path::{Path, PathBuf};

use crate::vmm::find_program;

const NAME: &str = "firecracker";
/// Below the directory above that of a program, for what people do not call themselves.
const LIBEXEC: &str = "libexec/imp";

/// The program that was named, that of PATH, the one beside this program, or where packages put such things.
pub(crate) fn find(named: Option<&Path>) -> Option<PathBuf> {
    let own = || std::env::current_exe().ok();
    named.map(Path::to_owned).or_else(|| find_program(NAME)).or_else(|| near(&own()?, Path::is_file))
}

fn near(program: &Path, is_there: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let directory = program.parent()?;
    let packaged = directory.parent().map(|above| above.join(LIBEXEC).join(NAME));
    [Some(directory.join(NAME)), packaged].into_iter().flatten().find(|path| is_there(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_looked_for_beside_imp_and_where_packages_put_it() {
        let imp = Path::new("/opt/imp/bin/imp");
        let at = |there: &'static str| near(imp, move |path| path == Path::new(there));
        for there in ["/opt/imp/bin/firecracker", "/opt/imp/libexec/imp/firecracker"] {
            assert_eq!(at(there).as_deref(), Some(Path::new(there)));
        }
        assert_eq!(at("/usr/bin/firecracker"), None);
        assert_eq!(find(Some(Path::new("/x/firecracker"))).as_deref(), Some(Path::new("/x/firecracker")));
    }
}
