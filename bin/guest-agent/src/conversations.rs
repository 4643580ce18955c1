//! The conversations with hosts that go on, so that those of a machine before can be ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

/// One connection of a host. Copies name the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Conversation(u64);

#[derive(Debug, Default)]
pub(crate) struct Conversations(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    begun: u64,
    going_on: HashMap<Conversation, AbortHandle>,
}

impl Conversations {
    pub(crate) fn begin(&self) -> Conversation {
        let mut state = self.state();
        state.begun += 1;
        Conversation(state.begun)
    }

    /// Runs a conversation to its end, in a task, so that a panic ends it and not the agent.
    pub(crate) async fn hold<F>(self: &Arc<Self>, conversation: Conversation, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let task = tokio::spawn(task);
        self.state().going_on.insert(conversation, task.abort_handle());
        let _ = task.await;
        self.state().going_on.remove(&conversation);
    }

    pub(crate) fn end_all_but(&self, conversation: Conversation) {
        for (other, task) in &self.state().going_on {
            if *other != conversation {
                task.abort();
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_but_one_end() {
        let conversations = Arc::new(Conversations::default());
        let [one, two] = [(), ()].map(|()| conversations.begin());
        let held = [one, two].map(|it| {
            let conversations = Arc::clone(&conversations);
            tokio::spawn(async move { conversations.hold(it, std::future::pending()).await })
        });
        while conversations.state().going_on.len() < 2 {
            tokio::task::yield_now().await;
        }
        conversations.end_all_but(two);
        let [first, second] = held;
        first.await.unwrap();
        assert!(!second.is_finished());
        assert_eq!(conversations.state().going_on.keys().collect::<Vec<_>>(), [&two]);
    }
}
