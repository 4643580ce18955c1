//! Starts a child process without copying this one: the child borrows this process's memory until it has called execve.
//!
//! `fork` costs page tables, and under emulation that is most of the time an exec takes. The child here runs on a stack
//! of its own while the calling thread waits (`CLONE_VM | CLONE_VFORK`, as posix_spawn does), and can still do what
//! posix_spawn cannot: begin in a cgroup, take a controlling terminal, become another user. A process that is moved to a
//! cgroup later waits for all processors of the machine; one that begins there does not.

use std::arch::asm;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::process::{WaitId, WaitIdOptions, waitid};

/// What the child needs before it executes a program.
#[derive(Debug)]
pub struct Spawn<'a> {
    /// Paths tried in order until one can be executed.
    pub programs: &'a [CString],
    /// The whole argument vector, the program's own name included.
    pub arguments: &'a [CString],
    pub environment: &'a [CString],
    pub directory: &'a CStr,
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
    pub terminal: ControllingTerminal,
    pub uid: u32,
    pub gid: u32,
    pub groups: &'a [u32],
    /// Soft and hard limit of open files.
    pub open_files: Option<u64>,
    /// Directory of the cgroup (v2) that it begins in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// Whether stdin becomes the controlling terminal of the child's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControllingTerminal {
    Stdin,
    None,
}

/// A started process. It is this process's child and has to be waited for.
#[derive(Debug)]
pub struct Child {
    pub pid: u32,
    pub pidfd: OwnedFd,
}

/// What the child was doing when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Session,
    Descriptors,
    Terminal,
    Limits,
    Directory,
    User,
    Program,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no process could be made")]
    Clone(#[source] io::Error),
    #[error("the new process failed at its {step:?}")]
    Child { step: Step, source: io::Error },
}

/// Bytes of the child's stack: it calls nothing deep.
const STACK: usize = 64 << 10;

/// Starts a process in a session of its own.
///
/// Ignored signals other than SIGPIPE stay ignored; handlers of this process must not be installed for signals that
/// can arrive between the child's start and its execve (block them and use a signalfd instead).
pub fn spawn(spawn: &Spawn<'_>) -> Result<Child, Error> {
    if [spawn.stdin, spawn.stdout, spawn.stderr].iter().any(|fd| fd.as_raw_fd() < 3) {
        return Err(Error::Clone(io::Error::from(io::ErrorKind::InvalidInput)));
    }
    let arguments = pointers(spawn.arguments);
    let environment = pointers(spawn.environment);
    let programs = pointers(spawn.programs);
    let mut shared = Shared {
        programs: programs.as_ptr(),
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        directory: spawn.directory.as_ptr(),
        descriptors: [spawn.stdin.as_raw_fd(), spawn.stdout.as_raw_fd(), spawn.stderr.as_raw_fd()],
        terminal: spawn.terminal,
        uid: spawn.uid,
        gid: spawn.gid,
        groups: spawn.groups.as_ptr(),
        group_count: spawn.groups.len(),
        open_files: spawn.open_files,
        failure: None,
    };
    // Aligned to 16 bytes, as the top of a stack must be.
    let mut stack = vec![0_u128; STACK / size_of::<u128>()];
    let mut pidfd: c_int = -1;
    let mut flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD).cast_unsigned().into();
    if spawn.cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let arguments = CloneArguments {
        flags,
        pidfd: (&raw mut pidfd).expose_provenance() as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr().expose_provenance() as u64,
        stack_size: STACK as u64,
        cgroup: spawn.cgroup.map_or(0, |fd| fd.as_raw_fd() as u64),
        ..CloneArguments::default()
    };

    let signals = AllBlocked::block().map_err(Error::Clone)?;
    let shared: *mut Shared = &raw mut shared;
    // SAFETY: CLONE_VFORK suspends this thread until the child has left this memory (execve or exit), so the stack and
    // everything `shared` points to outlive the child's use of them, and nobody else has them. The child makes system calls
    // only and no signal handler can run in it: all are blocked.
    let pid = unsafe { clone(&arguments, shared) };
    drop(signals);
    let pid = pid.map_err(Error::Clone)?;

    // SAFETY: the child wrote here, if at all, before this thread was let go on; volatile because the compiler cannot know.
    let failure = unsafe { shared.read_volatile() }.failure;
    // SAFETY: the kernel made this descriptor for us (CLONE_PIDFD) and nobody else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    match failure {
        None => Ok(Child { pid, pidfd }),
        Some((step, errno)) => {
            // It has called exit, or is about to.
            let _ = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
            Err(Error::Child { step, source: io::Error::from_raw_os_error(errno) })
        }
    }
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Everything the child reads and writes, made before it exists: it must not allocate.
struct Shared {
    programs: *const *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    directory: *const c_char,
    descriptors: [c_int; 3],
    terminal: ControllingTerminal,
    uid: u32,
    gid: u32,
    groups: *const u32,
    group_count: usize,
    open_files: Option<u64>,
    failure: Option<(Step, c_int)>,
}

/// What clone3 takes (linux/sched.h); fields that are not used here are 0.
#[repr(C)]
#[derive(Debug, Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    /// The lowest address.
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// clone3, which the C library does not offer: the child goes on in [`child`], on the stack that it is given.
///
/// # Safety
/// Everything that `arguments` and `shared` point to is valid for as long as the child uses it, and used by nobody else. The
/// top of the stack is aligned to 16 bytes.
unsafe fn clone(arguments: &CloneArguments, shared: *mut Shared) -> io::Result<u32> {
    let result: i64;
    // SAFETY: the kernel reads as many bytes as it is told there are. In this process the system call changes what is
    // declared here; the child, whose registers are the same but for its empty stack, never comes back from its call.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") arguments,
            in("rsi") size_of::<CloneArguments>(),
            in("r12") shared,
            in("r13") child as extern "C" fn(*mut Shared) -> !,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    u32::try_from(result)
        .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)))
}

extern "C" fn child(shared: *mut Shared) -> ! {
    // SAFETY: the parent passed a valid pointer and is suspended: this is the only reference.
    let request = unsafe { &*shared };
    // SAFETY: this is the child of `spawn`.
    let failure = match unsafe { prepare_and_execute(request) } {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    // SAFETY: as above, and `request` is not used any more.
    let told = unsafe { &raw mut (*shared).failure };
    // SAFETY: a valid pointer; volatile so that the write is not dropped before the exit.
    unsafe { told.write_volatile(Some(failure)) };
    // SAFETY: ends only this process, without running the parent's exit handlers.
    unsafe { libc::_exit(127) }
}

/// Returns only when something failed.
///
/// # Safety
/// Runs in the child of [`spawn`], whose pointers are all valid. The raw system calls for user and groups are needed:
/// glibc's wrappers signal all threads of the memory they run in, and those are the parent's.
unsafe fn prepare_and_execute(shared: &Shared) -> Result<std::convert::Infallible, (Step, c_int)> {
    // SAFETY: no pointers.
    check(Step::Session, i64::from(unsafe { libc::setsid() }))?;
    for (target, &source) in shared.descriptors.iter().enumerate() {
        // SAFETY: no pointers; the child's descriptor table is its own.
        check(Step::Descriptors, i64::from(unsafe { libc::dup2(source, target as c_int) }))?;
    }
    if shared.terminal == ControllingTerminal::Stdin {
        // SAFETY: TIOCSCTTY takes an integer.
        check(Step::Terminal, i64::from(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) }))?;
    }
    if let Some(files) = shared.open_files {
        let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
        // SAFETY: a valid structure.
        check(Step::Limits, i64::from(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }))?;
    }
    // The parent may be protected from the kernel's out-of-memory killer; what it starts is not.
    // SAFETY: constant strings.
    let score = unsafe { libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
    if score >= 0 {
        // SAFETY: one readable byte. A failure leaves the parent's score, which matters to the killer's choice only.
        unsafe { libc::write(score, c"0".as_ptr().cast(), 1) };
    }
    // SAFETY: a valid string.
    check(Step::Directory, i64::from(unsafe { libc::chdir(shared.directory) }))?;
    // SAFETY: `groups` points to `group_count` ids.
    check(Step::User, unsafe { libc::syscall(libc::SYS_setgroups, shared.group_count, shared.groups) })?;
    // SAFETY: no pointers.
    check(Step::User, unsafe { libc::syscall(libc::SYS_setresgid, shared.gid, shared.gid, shared.gid) })?;
    // SAFETY: no pointers.
    check(Step::User, unsafe { libc::syscall(libc::SYS_setresuid, shared.uid, shared.uid, shared.uid) })?;
    // Descriptors that this process itself inherited go no further.
    // SAFETY: no pointers; it sets a flag in the child's own table.
    unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    // SAFETY: the disposition table is the child's own.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let none = signal_set(Signals::None);
    // SAFETY: a valid set; the old one is not asked for.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) };

    let mut failure = libc::ENOENT;
    let mut program = shared.programs;
    // SAFETY: the list ends with a null pointer.
    while let candidate = unsafe { *program }
        && !candidate.is_null()
    {
        // SAFETY: strings and vectors end with null, as execve wants.
        unsafe { libc::execve(candidate, shared.arguments, shared.environment) };
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        match errno {
            libc::ENOENT | libc::ENOTDIR => {}
            // A later directory may hold one that can be executed; if none does, this is the reason to report.
            libc::EACCES => failure = errno,
            _ => return Err((Step::Program, errno)),
        }
        // SAFETY: the element was not the last.
        program = unsafe { program.add(1) };
    }
    Err((Step::Program, failure))
}

fn check(step: Step, result: i64) -> Result<(), (Step, c_int)> {
    if result < 0 {
        Err((step, io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)))
    } else {
        Ok(())
    }
}

/// All signals of this thread are blocked until this is dropped.
struct AllBlocked {
    before: libc::sigset_t,
}

impl AllBlocked {
    fn block() -> io::Result<Self> {
        let all = signal_set(Signals::All);
        let mut before = signal_set(Signals::None);
        // SAFETY: both sets are valid.
        let result = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
        if result == 0 { Ok(Self { before }) } else { Err(io::Error::from_raw_os_error(result)) }
    }
}

impl Drop for AllBlocked {
    fn drop(&mut self) {
        // SAFETY: `before` is the set the kernel gave us.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

enum Signals {
    None,
    All,
}

fn signal_set(signals: Signals) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    match signals {
        // SAFETY: initialises the set.
        Signals::None => unsafe { libc::sigemptyset(set.as_mut_ptr()) },
        // SAFETY: initialises the set.
        Signals::All => unsafe { libc::sigfillset(set.as_mut_ptr()) },
    };
    // SAFETY: initialised just now.
    unsafe { set.assume_init() }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    fn strings(words: &[&str]) -> Vec<CString> {
        words.iter().map(|word| CString::new(*word).expect("no zero bytes")).collect()
    }

    fn run(programs: &[&str], arguments: &[&str]) -> Result<(String, i32), Error> {
        let null = File::options().read(true).write(true).open("/dev/null").expect("/dev/null opens");
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let child = spawn(&Spawn {
            programs: &strings(programs),
            arguments: &strings(arguments),
            environment: &strings(&["GREETING=hello"]),
            directory: c"/usr",
            stdin: null.as_fd(),
            stdout: writer.as_fd(),
            stderr: null.as_fd(),
            terminal: ControllingTerminal::None,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            groups: &[],
            open_files: Some(64),
            cgroup: None,
        })?;
        drop(writer);
        let mut output = String::new();
        reader.read_to_string(&mut output).expect("output");
        let end = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).expect("own child");
        Ok((output, end.and_then(|end| end.exit_status()).expect("it exits")))
    }

    #[test]
    fn a_process_gets_exactly_what_it_was_given() {
        let script = "echo $GREETING $PWD $(ulimit -n) \"$1\"; exit 3";
        let (output, code) =
            run(&["/nonexistent/sh", "/bin/sh"], &["sh", "-c", script, "x", "$a 'b'"]).expect("it runs");
        assert_eq!((output.as_str(), code), ("hello /usr 64 $a 'b'\n", 3));
    }

    #[test]
    fn a_program_that_is_not_there_is_told_from_one_that_cannot_be_executed() {
        let errno = |programs: &[&str]| match run(programs, &["a"]) {
            Err(Error::Child { step: Step::Program, source }) => source.raw_os_error(),
            other => panic!("{other:?}"),
        };
        assert_eq!(errno(&["/nonexistent/a", "/nonexistent/b"]), Some(libc::ENOENT));
        assert_eq!(errno(&["/usr", "/nonexistent/b"]), Some(libc::EACCES));
    }
}
