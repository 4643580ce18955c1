//! Generates the protobuf types and gRPC services from `proto/`, without an installed protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let files = ["imp/guest/v1/guest.proto", "imp/runtime/v1/runtime.proto"];
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
