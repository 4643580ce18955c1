//! How the program is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A position-independent program is full of addresses to be corrected when it starts. Packed, their table is a hundred
    // times smaller, and stays that much smaller in memory for as long as the machine is there. The C library must be of 2022 or newer.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
}
