//! The test's end of a node's channel: one thread reads, conversations get what is theirs.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use imp_testkit_node::wire::{Frame, Message, WINDOW};

/// A node reads always; one that does not for so long has stopped.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Channel {
    stream: UnixStream,
    writer: Mutex<UnixStream>,
    routes: Arc<Mutex<Routes>>,
}

#[derive(Debug, Default)]
struct Routes {
    next: u32,
    open: HashMap<u32, Route>,
    ended: bool,
}

#[derive(Debug)]
struct Route {
    messages: Sender<Message>,
    window: Arc<Window>,
}

/// Both ends of one program, as the test sees it.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) number: u32,
    pub(super) messages: Receiver<Message>,
    pub(super) window: Arc<Window>,
}

impl Channel {
    /// Starts reading. The first conversation is the node's own; its only message says that the node is ready.
    pub(super) fn new(stream: UnixStream) -> io::Result<(Self, Conversation)> {
        let (reader, writer) = (stream.try_clone()?, stream.try_clone()?);
        writer.set_write_timeout(Some(WRITE_DEADLINE))?;
        let routes = Arc::new(Mutex::new(Routes::default()));
        let this = Self { stream, writer: Mutex::new(writer), routes: Arc::clone(&routes) };
        let node = this.open();
        thread::Builder::new().name("node-channel".to_owned()).spawn(move || read(&reader, &routes))?;
        Ok((this, node))
    }

    /// A conversation in which nothing has been said.
    pub(super) fn open(&self) -> Conversation {
        let (sender, messages) = channel();
        let window = Arc::new(Window::default());
        let mut routes = lock(&self.routes);
        let number = routes.next;
        routes.next += 1;
        if routes.ended {
            window.close();
        } else {
            routes.open.insert(number, Route { messages: sender, window: Arc::clone(&window) });
        }
        Conversation { number, messages, window }
    }

    pub(super) fn send(&self, conversation: u32, message: Message) -> io::Result<()> {
        Frame::new(conversation, message).write(&*lock(&self.writer))
    }

    /// What is said in it from now on is dropped.
    pub(super) fn forget(&self, conversation: u32) {
        lock(&self.routes).open.remove(&conversation);
    }

    /// Ends the node, as its guard sees the hang-up.
    pub(super) fn hang_up(&self) {
        // One that has gone already has hung up itself.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Until the node ends. Then every conversation ends, too: its receiver finds no sender.
fn read(mut stream: &UnixStream, routes: &Mutex<Routes>) {
    while let Ok(Some(Frame { conversation, message })) = Frame::read(&mut stream) {
        let mut routes = lock(routes);
        let Some(route) = routes.open.get(&conversation) else { continue };
        if let Message::Took(count) = message {
            route.window.took(count as usize);
            continue;
        }
        let last = matches!(message, Message::End(_));
        let gone = route.messages.send(message).is_err();
        if last || gone {
            route.window.close();
            routes.open.remove(&conversation);
        }
    }
    let mut routes = lock(routes);
    routes.ended = true;
    for (_, route) in routes.open.drain() {
        route.window.close();
    }
}

/// How much input may be sent to a program.
#[derive(Debug, Default)]
pub(super) struct Window {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    on_the_way: usize,
    closed: bool,
}

impl Window {
    /// Waits until `count` more bytes may be sent; false when the program takes none any more, or not by then.
    pub(super) fn reserve(&self, count: usize, until: Instant) -> bool {
        let mut state = lock(&self.state);
        while !state.closed && state.on_the_way + count > WINDOW {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return false };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.on_the_way += count;
        !state.closed
    }

    fn took(&self, count: usize) {
        let mut state = lock(&self.state);
        state.on_the_way = state.on_the_way.saturating_sub(count);
        self.changed.notify_all();
    }

    fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }
}

/// A thread that panicked with the lock held has failed its test already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
