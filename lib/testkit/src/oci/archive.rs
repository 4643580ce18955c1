//! Images as one file: an OCI archive, and the tar that `docker save` writes.

use std::fs::{self, File};
use std::path::Path;

use serde_json::{Value, json};

use super::image::Image;
use super::layout::{Written, file_name};

impl Image {
    /// Writes a tar of an OCI layout.
    pub fn write_archive(self, path: &Path, tag: &str) -> anyhow::Result<Written> {
        let folder = tempfile::tempdir()?;
        let written = self.write_layout(folder.path(), tag)?;
        let mut tar = tar::Builder::new(File::create(path)?);
        tar.append_dir_all(".", folder.path())?;
        tar.finish()?;
        Ok(written)
    }

    /// Writes the tar of `docker save`: `manifest.json`, a configuration and one plain tar per layer. `name` is what
    /// the image is called in it, e.g. `example:1`.
    pub fn write_docker_archive(mut self, path: &Path, name: &str) -> anyhow::Result<Written> {
        for layer in &mut self.layers {
            layer.compression = super::Compression::None;
        }
        let folder = tempfile::tempdir()?;
        let written = self.write_layout(folder.path(), "saved")?;
        let blobs = folder.path().join("blobs/sha256");

        let mut tar = tar::Builder::new(File::create(path)?);
        let config = format!("{}.json", file_name(&written.config));
        tar.append_path_with_name(blobs.join(file_name(&written.config)), &config)?;
        let mut layers: Vec<String> = Vec::new();
        for (number, layer) in written.layers.iter().enumerate() {
            let name = format!("layer-{number}/layer.tar");
            tar.append_path_with_name(blobs.join(file_name(layer)), &name)?;
            layers.push(name);
        }
        let manifest: Value = json!([{ "Config": config, "RepoTags": [name], "Layers": layers }]);
        let manifest_path = folder.path().join("manifest.json");
        fs::write(&manifest_path, serde_json::to_vec(&manifest)?)?;
        tar.append_path_with_name(&manifest_path, "manifest.json")?;
        tar.finish()?;
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::Layer;

    fn names(path: &Path) -> Vec<String> {
        tar::Archive::new(File::open(path).unwrap())
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect()
    }

    #[test]
    fn a_docker_archive_names_its_parts_in_its_manifest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.tar");
        let image = Image::new().layer(Layer::new().file("a", 0o644, b"a"));
        let written = image.write_docker_archive(&path, "example:1").unwrap();
        assert_eq!(written.layers, written.diff_ids);
        let names = names(&path);
        for name in [
            format!("{}.json", file_name(&written.config)),
            "layer-0/layer.tar".into(),
            "manifest.json".into(),
        ] {
            assert!(names.contains(&name), "{name} is not in {names:?}");
        }
    }

    #[test]
    fn an_oci_archive_holds_a_layout() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.tar");
        let written = Image::new().write_archive(&path, "latest").unwrap();
        let names = names(&path);
        let manifest = format!("blobs/sha256/{}", file_name(&written.manifest));
        assert!(
            ["oci-layout", "index.json", &manifest].iter().all(|name| names.contains(&(*name).to_owned())),
            "{names:?}"
        );
    }
}
