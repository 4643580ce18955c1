//! One module for each verb.

pub(crate) mod attach;
pub(crate) mod completions;
pub(crate) mod cp;
pub(crate) mod doctor;
pub(crate) mod each;
pub(crate) mod exec;
pub(crate) mod fork;
pub(crate) mod image;
pub(crate) mod inspect;
pub(crate) mod kill;
pub(crate) mod logs;
pub(crate) mod owner;
pub(crate) mod pause;
pub(crate) mod pool;
pub(crate) mod port_forward;
pub(crate) mod probe;
pub(crate) mod prune;
pub(crate) mod ps;
pub(crate) mod resume;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod stop;
pub(crate) mod template;
pub(crate) mod top;
pub(crate) mod version;
pub(crate) mod wait;
