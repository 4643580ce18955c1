//! Starts a program that outlives its parent, without copying the parent: `posix_spawn`, which borrows the parent's
//! memory until the program is there, in a session of its own.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use rustix::process::Pid;

/// From <spawn.h>, the same in glibc and musl.
const SETSID: libc::c_int = 0x80;

/// A program and what it gets; everything else that this process has open stays behind if it is close-on-exec.
#[derive(Debug)]
pub struct Program<'a> {
    /// Absolute.
    pub path: &'a Path,
    /// Without the program's own name, which is `path`.
    pub arguments: &'a [OsString],
    /// The whole environment, `NAME=value`.
    pub environment: &'a [OsString],
    /// Working directory; absent: this process's own.
    pub directory: Option<&'a Path>,
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
    /// Descriptors that the program inherits under the numbers that they have here.
    pub inherited: &'a [BorrowedFd<'a>],
}

/// Starts the program in a new session, with default signal actions and no signal blocked.
pub fn spawn_detached(program: &Program<'_>) -> io::Result<Pid> {
    let path = c_string(program.path.as_os_str())?;
    let mut arguments = vec![path.clone()];
    for argument in program.arguments {
        arguments.push(c_string(argument)?);
    }
    let environment = program.environment.iter().map(|v| c_string(v)).collect::<io::Result<Vec<_>>>()?;

    let mut actions = FileActions::new()?;
    for (target, source) in [(0, program.stdin), (1, program.stdout), (2, program.stderr)] {
        actions.duplicate(source.as_raw_fd(), target)?;
    }
    for descriptor in program.inherited {
        // Onto itself: that takes close-on-exec away in the child alone.
        actions.duplicate(descriptor.as_raw_fd(), descriptor.as_raw_fd())?;
    }
    let directory = program.directory.map(|directory| c_string(directory.as_os_str())).transpose()?;
    if let Some(directory) = &directory {
        actions.change_directory(directory)?;
    }
    let attributes = Attributes::detached()?;

    let argv = pointers(&arguments);
    let envp = pointers(&environment);
    let mut pid = 0;
    // SAFETY: all strings and both arrays live until after the call, the arrays end with a null pointer, and actions
    // and attributes are initialised.
    let result = unsafe {
        libc::posix_spawn(&mut pid, path.as_ptr(), &actions.0, &attributes.0, argv.as_ptr(), envp.as_ptr())
    };
    check(result)?;
    Pid::from_raw(pid).ok_or_else(|| io::Error::other("posix_spawn returned no process id"))
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(io::Error::from)
}

fn pointers(strings: &[CString]) -> Vec<*mut libc::c_char> {
    strings.iter().map(|s| s.as_ptr().cast_mut()).chain([ptr::null_mut()]).collect()
}

/// These functions return the error instead of setting errno.
fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}

struct FileActions(libc::posix_spawn_file_actions_t);

impl FileActions {
    fn new() -> io::Result<Self> {
        let mut actions = MaybeUninit::uninit();
        // SAFETY: the pointer is valid for writing.
        check(unsafe { libc::posix_spawn_file_actions_init(actions.as_mut_ptr()) })?;
        // SAFETY: initialised by the successful call above.
        Ok(Self(unsafe { actions.assume_init() }))
    }

    fn duplicate(&mut self, source: libc::c_int, target: libc::c_int) -> io::Result<()> {
        // SAFETY: the actions are initialised; the descriptors are numbers that are only used in the child.
        check(unsafe { libc::posix_spawn_file_actions_adddup2(&mut self.0, source, target) })
    }

    fn change_directory(&mut self, directory: &CStr) -> io::Result<()> {
        // SAFETY: the actions are initialised; the string is copied.
        check(unsafe { libc::posix_spawn_file_actions_addchdir_np(&mut self.0, directory.as_ptr()) })
    }
}

impl Drop for FileActions {
    fn drop(&mut self) {
        // SAFETY: initialised in `new`, destroyed only here.
        unsafe { libc::posix_spawn_file_actions_destroy(&mut self.0) };
    }
}

struct Attributes(libc::posix_spawnattr_t);

impl Attributes {
    fn detached() -> io::Result<Self> {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the pointer is valid for writing.
        check(unsafe { libc::posix_spawnattr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: initialised by the successful call above.
        let mut attributes = Self(unsafe { attributes.assume_init() });
        let mut signals = MaybeUninit::uninit();
        // SAFETY: the pointer is valid for writing.
        unsafe { libc::sigemptyset(signals.as_mut_ptr()) };
        // SAFETY: initialised by the call above, which cannot fail for a valid pointer.
        let none = unsafe { signals.assume_init() };
        // SAFETY: attributes and set are initialised.
        check(unsafe { libc::posix_spawnattr_setsigmask(&mut attributes.0, &none) })?;
        let mut all = none;
        // SAFETY: the pointer is valid for writing.
        unsafe { libc::sigfillset(&mut all) };
        // SAFETY: attributes and set are initialised.
        check(unsafe { libc::posix_spawnattr_setsigdefault(&mut attributes.0, &all) })?;
        let flags =
            SETSID | libc::POSIX_SPAWN_SETSIGMASK as libc::c_int | libc::POSIX_SPAWN_SETSIGDEF as libc::c_int;
        // SAFETY: the attributes are initialised.
        check(unsafe { libc::posix_spawnattr_setflags(&mut attributes.0, flags as libc::c_short) })?;
        Ok(attributes)
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: initialised in `detached`, destroyed only here.
        unsafe { libc::posix_spawnattr_destroy(&mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use rustix::process::{WaitOptions, waitpid};

    use super::*;

    #[test]
    fn a_program_gets_its_descriptors_environment_and_session_and_nothing_else() {
        let null = File::open("/dev/null").unwrap();
        let (mut out, out_writer) = std::io::pipe().unwrap();
        let (given, mut given_writer) = std::io::pipe().unwrap();
        let (kept, _kept_writer) = std::io::pipe().unwrap();
        given_writer.write_all(b"given\n").unwrap();
        let script = format!(
            "read x </proc/self/fd/{}; echo $x $NAME; pwd; read a b c d e f rest </proc/self/stat; [ $f = $$ ] && echo session; [ -e /proc/self/fd/{} ] || echo closed",
            given.as_raw_fd(),
            kept.as_raw_fd()
        );
        let pid = spawn_detached(&Program {
            path: Path::new("/bin/sh"),
            arguments: &["-c".into(), script.into()],
            environment: &["NAME=value".into()],
            directory: Some(Path::new("/usr")),
            stdin: null.as_fd(),
            stdout: out_writer.as_fd(),
            stderr: null.as_fd(),
            inherited: &[given.as_fd()],
        })
        .unwrap();
        drop(out_writer);
        let mut text = String::new();
        out.read_to_string(&mut text).unwrap();
        assert_eq!(text, "given value\n/usr\nsession\nclosed\n");
        waitpid(Some(pid), WaitOptions::empty()).unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_at_once() {
        let null = File::open("/dev/null").unwrap();
        let error = spawn_detached(&Program {
            path: Path::new("/nonexistent/program"),
            arguments: &[],
            environment: &[],
            directory: None,
            stdin: null.as_fd(),
            stdout: null.as_fd(),
            stderr: null.as_fd(),
            inherited: &[],
        })
        .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
