//! What our processes say to each other: generated messages, the greeting on a guest's channel, clients and
//! conversions.
//!
//! Messages of the owner's socket go no further than lib/embedded, which has both ends of it. Those of a guest are also in
//! the hands of the commands that call its services: what copies files or leads ports is made of such calls.

pub mod archive_time;
pub mod boot;
pub mod causes;
pub mod connection;
pub mod hello;
pub mod lane;
pub mod process;
pub mod signal;

/// Messages and services between a host and the agent inside a VM.
pub mod guest {
    #![expect(
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        clippy::large_enum_variant,
        reason = "generated code"
    )]
    tonic::include_proto!("imp.guest.v1");
}

/// Messages and services between a client and the process that owns a machine's VMs.
pub mod runtime {
    #![expect(clippy::allow_attributes, clippy::allow_attributes_without_reason, reason = "generated code")]
    tonic::include_proto!("imp.runtime.v1");
}
