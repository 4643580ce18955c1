//! The budgets of VMs in Firecracker, which are measured where KVM runs guests.

pub(super) mod boot;
pub(super) mod copy;
pub(super) mod network;
