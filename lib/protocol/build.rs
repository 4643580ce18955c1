//! Generates the protobuf types and gRPC services from `proto/`, without an installed protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    // The messages of the guest that an owner passes on are the same types in both.
    let of_runtime = ["runtime", "snapshots", "pools"].map(|name| format!("imp/runtime/v1/{name}.proto"));
    let runtime = protox::compile(of_runtime, ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .extern_path(".imp.guest.v1", "crate::guest")
        .compile_fds(runtime)?;
    // Last: the compilation before leaves an empty module in the place of the guest's.
    let guest = protox::compile(["imp/guest/v1/guest.proto"], ["proto"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(guest)?;
    Ok(())
}
