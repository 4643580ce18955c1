//! Output that could not be written: noted in the log where it is missing, and told to the VM now and then.

use std::io;

use crate::status::LostOutput;

#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Since something was written last.
    here: u64,
    told: u64,
    untold: u64,
    /// What the loss that is under way, or the last one, began with.
    why: String,
}

impl Losses {
    pub(super) fn add(&mut self, bytes: u64, error: &io::Error) {
        if self.here == 0 {
            self.why = error.to_string();
        }
        self.here = self.here.saturating_add(bytes);
        self.untold = self.untold.saturating_add(bytes);
    }

    /// The line that stands for what is missing; none if nothing is.
    pub(super) fn note(&self) -> Option<String> {
        let Self { here, why, .. } = self;
        (*here > 0).then(|| format!("imp: {here} bytes of output are missing here: {why}\n"))
    }

    /// The loss is over: its note is written, or nothing comes any more.
    pub(super) fn over(&mut self) {
        self.here = 0;
    }

    /// What is to be told while more may come: the first loss, and again when all has doubled since. So a guest tells little,
    /// whether it floods or its losses come and go.
    pub(super) fn news(&mut self) -> Option<LostOutput> {
        (self.untold > self.told).then(|| self.tell())
    }

    /// What is to be told when nothing comes any more.
    pub(super) fn rest(&mut self) -> Option<LostOutput> {
        (self.untold > 0).then(|| self.tell())
    }

    fn tell(&mut self) -> LostOutput {
        let bytes = std::mem::take(&mut self.untold);
        self.told = self.told.saturating_add(bytes);
        LostOutput { bytes, why: self.why.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_told_at_first_when_all_has_doubled_and_at_the_end() {
        let (full, closed) = (io::Error::other("full"), io::Error::other("closed"));
        let mut losses = Losses::default();
        let told = |losses: &mut Losses| losses.news().map(|lost| (lost.bytes, lost.why));
        assert_eq!(told(&mut losses), None);
        losses.add(10, &full);
        assert_eq!(told(&mut losses), Some((10, "full".to_owned())));
        losses.add(9, &closed);
        assert_eq!(told(&mut losses), None);
        losses.add(2, &closed);
        assert_eq!(told(&mut losses), Some((11, "full".to_owned())));
        losses.add(1, &closed);
        assert_eq!(losses.note().unwrap(), "imp: 22 bytes of output are missing here: full\n");
        losses.over();
        assert_eq!((told(&mut losses), losses.note()), (None, None));
        assert_eq!(losses.rest().map(|lost| lost.bytes), Some(1));
        assert_eq!(losses.rest(), None);
    }

    #[test]
    fn losses_that_come_and_go_are_told_as_seldom_as_a_flood() {
        let mut losses = Losses::default();
        let mut told = Vec::new();
        for _ in 0..1000 {
            losses.add(1, &io::Error::other("full"));
            told.extend(losses.news());
            losses.over();
            told.extend(losses.news());
        }
        assert!(told.len() <= 10, "{told:?}");
        told.extend(losses.rest());
        assert_eq!(told.iter().map(|lost| lost.bytes).sum::<u64>(), 1000);
    }
}
