//! Safe wrappers over the kernel: the only crate with `unsafe`.

pub mod allowance;
pub mod child;
pub mod code;
pub mod descriptors;
pub mod entropy;
pub mod fanotify;
pub mod heap;
pub mod inherit;
pub mod kvm;
pub mod netlink;
pub mod netns;
pub mod new_file;
pub mod page_cache;
pub mod readiness;
pub mod reading;
pub mod signals;
pub mod sparse;
pub mod spawn;
pub mod tap;
pub mod tcp;
pub mod tsc;
pub mod verity;
pub mod vsock;
