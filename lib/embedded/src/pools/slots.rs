//! Which pools there are. One that is being made or removed holds its name meanwhile, and is no pool for anybody else.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Error;
use crate::name::PoolName;

/// `K`: what keeps a pool.
pub(super) struct Slots<K>(Mutex<BTreeMap<PoolName, Slot<K>>>);

enum Slot<K> {
    Changing,
    Kept(K),
}

/// Of a pool that is being made or removed. It is gone when this is dropped, unless it is settled.
pub(super) struct Change<'a, K> {
    slots: &'a Slots<K>,
    name: PoolName,
}

impl<K> Default for Slots<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K> Slots<K> {
    pub(super) fn make(&self, name: &PoolName) -> Result<Change<'_, K>, Error> {
        let mut slots = self.lock();
        match slots.get(name) {
            Some(Slot::Kept(_)) => return Err(Error::Taken(name.clone())),
            Some(Slot::Changing) => return Err(Error::Changing(name.clone())),
            None => slots.insert(name.clone(), Slot::Changing),
        };
        Ok(Change { slots: self, name: name.clone() })
    }

    pub(super) fn remove(&self, name: &PoolName) -> Result<(Change<'_, K>, K), Error> {
        let mut slots = self.lock();
        match slots.insert(name.clone(), Slot::Changing) {
            Some(Slot::Kept(keeper)) => Ok((Change { slots: self, name: name.clone() }, keeper)),
            Some(Slot::Changing) => Err(Error::Changing(name.clone())),
            None => {
                slots.remove(name);
                Err(Error::NoSuchPool(name.to_string()))
            }
        }
    }

    /// Of one that is neither being made nor removed.
    pub(super) fn get<T>(&self, name: &PoolName, look: impl FnOnce(&K) -> T) -> Option<T> {
        match self.lock().get(name) {
            Some(Slot::Kept(keeper)) => Some(look(keeper)),
            Some(Slot::Changing) | None => None,
        }
    }

    /// As [`Slots::get`], of all, by name.
    pub(super) fn all<T>(&self, look: impl FnMut(&K) -> T) -> Vec<T> {
        let slots = self.lock();
        let kept = slots.values().filter_map(|slot| match slot {
            Slot::Kept(keeper) => Some(keeper),
            Slot::Changing => None,
        });
        kept.map(look).collect()
    }

    /// Counts those that are being made or removed, too.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PoolName, Slot<K>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Change<'_, K> {
    /// From now on there is the pool.
    pub(super) fn settle(self, keeper: K) {
        self.slots.lock().insert(self.name.clone(), Slot::Kept(keeper));
    }
}

impl<K> Drop for Change<'_, K> {
    fn drop(&mut self) {
        let mut slots = self.slots.lock();
        if matches!(slots.get(&self.name), Some(Slot::Changing)) {
            slots.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_is_made_or_removed_is_nobody_elses_meanwhile() {
        let (slots, name) = (Slots::default(), "warm".parse::<PoolName>().unwrap());
        let is_changing = |slots: &Slots<u32>| {
            matches!(slots.make(&name), Err(Error::Changing(_)))
                && matches!(slots.remove(&name), Err(Error::Changing(_)))
                && slots.get(&name, |_| ()).is_none()
                && !slots.is_empty()
        };
        // Given up.
        drop(slots.make(&name).unwrap());
        assert!(slots.is_empty() && matches!(slots.remove(&name), Err(Error::NoSuchPool(_))));
        let change = slots.make(&name).unwrap();
        assert!(is_changing(&slots));
        change.settle(1);
        assert!(
            slots.get(&name, |kept| *kept) == Some(1) && matches!(slots.make(&name), Err(Error::Taken(_)))
        );
        let (change, kept) = slots.remove(&name).unwrap();
        assert!(is_changing(&slots));
        // It could not be removed.
        change.settle(kept);
        assert_eq!(slots.all(|kept| *kept), [1]);
        drop(slots.remove(&name).unwrap());
        assert!(slots.is_empty());
    }
}
