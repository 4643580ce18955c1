//! Which processes the agent has started, and how the last ones ended.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::inherit::MainProcess;
use super::process::Process;
use super::spec::ProcessId;

/// Exits that are remembered.
const MOST_EXITS: usize = 1024;
/// Ended processes whose output is still kept.
const MOST_OUTPUTS: usize = 8;
/// Processes that run at the same time.
const MOST_RUNNING: usize = 4096;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "the id {0:?} is taken by a process that runs or whose exit was not acknowledged; choose another one"
    )]
    Taken(String),
    #[error("{MOST_RUNNING} processes run already; wait for one to end")]
    Full,
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    state: Mutex<State>,
    main: OnceLock<MainProcess>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<ProcessId, Entry>,
    /// Ids that ended, oldest first.
    ended: VecDeque<ProcessId>,
    next_number: u64,
}

#[derive(Debug)]
enum Entry {
    Starting,
    Known(Arc<Process>),
}

impl Table {
    /// What the main process was started with, from its start on.
    pub(super) fn main(&self) -> &OnceLock<MainProcess> {
        &self.main
    }

    /// For an agent that was started again beside an image's init: that is the main process, and runs.
    pub(crate) fn knows_init(self: &Arc<Self>) -> Result<(), Error> {
        let reservation = self.reserve(Some(ProcessId::main()))?;
        Process::init(reservation, None);
        Ok(())
    }

    /// Takes an id, the given one or a new one, for a process that is about to start.
    pub(crate) fn reserve(self: &Arc<Self>, wanted: Option<ProcessId>) -> Result<Reservation, Error> {
        let mut state = self.state();
        if state.entries.len() - state.ended.len().min(state.entries.len()) >= MOST_RUNNING {
            return Err(Error::Full);
        }
        let id = match wanted {
            Some(id) if state.entries.contains_key(&id) => return Err(Error::Taken(id.as_str().to_owned())),
            Some(id) => id,
            None => loop {
                state.next_number += 1;
                let id = ProcessId::numbered(state.next_number);
                if !state.entries.contains_key(&id) {
                    break id;
                }
            },
        };
        state.entries.insert(id.clone(), Entry::Starting);
        Ok(Reservation { table: Arc::clone(self), id, used: false })
    }

    pub(crate) fn get(&self, id: &ProcessId) -> Option<Arc<Process>> {
        match self.state().entries.get(id)? {
            Entry::Known(process) => Some(Arc::clone(process)),
            Entry::Starting => None,
        }
    }

    pub(crate) fn running(&self) -> Vec<Arc<Process>> {
        let state = self.state();
        let known = state.entries.values().filter_map(|entry| match entry {
            Entry::Known(process) => Some(process),
            Entry::Starting => None,
        });
        known.filter(|process| process.exit().is_none()).cloned().collect()
    }

    /// Remembers that a process has ended, and forgets the one that ended longest ago.
    pub(crate) fn ended(&self, id: &ProcessId) {
        let mut state = self.state();
        state.ended.push_back(id.clone());
        let stale = state.ended.len().checked_sub(MOST_OUTPUTS + 1).and_then(|place| state.ended.get(place));
        if let Some(id) = stale.filter(|id| !id.is_main())
            && let Some(Entry::Known(process)) = state.entries.get(id)
        {
            process.forget_output();
        }
        // The main process's exit is what the host waits for: it stays until it is acknowledged.
        if state.ended.len() > MOST_EXITS
            && let Some(oldest) = state.ended.iter().position(|id| !id.is_main())
            && let Some(id) = state.ended.remove(oldest)
        {
            state.entries.remove(&id);
        }
    }

    /// Forgets a process that has ended.
    pub(crate) fn forget(&self, id: &ProcessId) {
        let mut state = self.state();
        if let Some(place) = state.ended.iter().position(|ended| ended == id) {
            state.ended.remove(place);
            state.entries.remove(id);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An id that nobody else can take; given back when the process does not start.
#[derive(Debug)]
pub(crate) struct Reservation {
    table: Arc<Table>,
    id: ProcessId,
    used: bool,
}

impl Reservation {
    pub(crate) fn id(&self) -> &ProcessId {
        &self.id
    }

    pub(crate) fn fill(mut self, process: Arc<Process>) {
        self.used = true;
        self.table.state().entries.insert(self.id.clone(), Entry::Known(process));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.used {
            self.table.state().entries.remove(&self.id);
        }
    }
}
