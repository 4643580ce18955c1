//! OCI images written by hand: layers from tar entries, a configuration, and the forms in which images travel.
//!
//! ```
//! use imp_testkit::oci::{Image, Layer};
//! let base = Layer::new().directory("etc", 0o755).file("etc/motd", 0o644, b"hello");
//! let top = Layer::new().whiteout("etc/motd");
//! let image = Image::new().layer(base).layer(top).entrypoint(&["/bin/true"]);
//! let folder = tempfile::tempdir()?;
//! let written = image.write_layout(folder.path(), "latest")?;
//! assert!(written.manifest.starts_with("sha256:"));
//! # Ok::<(), anyhow::Error>(())
//! ```

mod archive;
mod image;
mod layer;
mod layout;

pub use image::Image;
pub use layer::{Compression, Layer, TIME};
pub use layout::Written;
