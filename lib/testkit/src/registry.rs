//! A real registry for tests, and a proxy in front of it that misbehaves as told.

mod fault_proxy;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail, ensure};

pub use fault_proxy::{FaultProxy, Reaction, Request};

use crate::machine::program;

const CERTIFICATE_FILE: &str = "certificate.pem";
const KEY_FILE: &str = "key.pem";
/// What openssl is told to certify: this address, and that it certifies nothing else.
const CERTIFICATE: &str = "[req]\ndistinguished_name = name\nx509_extensions = extensions\nprompt = no\n\
    [name]\nCN = registry of tests\n[extensions]\nsubjectAltName = IP:127.0.0.1\nbasicConstraints = CA:FALSE\n";

/// The distribution project's registry, on a port of its own of 127.0.0.1. It ends with this value.
#[derive(Debug)]
pub struct Registry {
    process: Child,
    address: String,
    folder: tempfile::TempDir,
}

impl Registry {
    /// Over plain HTTP.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(tempfile::tempdir()?, "")
    }

    /// Over TLS, with a certificate that only [`Self::certificate`] vouches for.
    pub fn start_with_tls() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("certificate.cnf");
        fs::write(&config, CERTIFICATE)?;
        let output = Command::new(program("openssl")?)
            .args(["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"])
            .args(["-pkeyopt", "ec_paramgen_curve:prime256v1", "-config"])
            .arg(&config)
            .arg("-keyout")
            .arg(folder.path().join(KEY_FILE))
            .arg("-out")
            .arg(folder.path().join(CERTIFICATE_FILE))
            .output()?;
        ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
        let path = folder.path().display().to_string();
        let tls = format!("  tls:\n    certificate: {path}/{CERTIFICATE_FILE}\n    key: {path}/{KEY_FILE}\n");
        Self::start_with(folder, &tls)
    }

    fn start_with(folder: tempfile::TempDir, http: &str) -> anyhow::Result<Self> {
        let config = folder.path().join("config.yml");
        let root = folder.path().join("data");
        let text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:0\n  relativeurls: true\n  secret: tests\n{http}",
            root.display()
        );
        fs::write(&config, text)?;
        let mut process = Command::new(program("docker-registry")?)
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let log = process.stderr.take().context("the registry has no log")?;
        let mut lines = BufReader::new(log).lines();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let (_, rest) = line.split_once("listening on ")?;
            Some(rest.split(['"', ' ', ',']).next()?.to_owned())
        });
        // Nobody reads the rest; a full pipe would stop the registry.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        let Some(address) = address else {
            let _ = process.kill();
            let _ = process.wait();
            bail!("the registry ended before it listened")
        };
        Ok(Self { process, address, folder })
    }

    /// HOST:PORT
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Pushes the image with this tag from an OCI layout, all its platforms, to `repository:tag`.
    pub fn push(&self, layout: &Path, tag: &str, repository: &str) -> anyhow::Result<()> {
        self.push_as(layout, tag, &format!("{repository}:{tag}"))
    }

    /// Pushes the image that the layout calls `name`, all its platforms, to `target`: `REPOSITORY:TAG`.
    pub fn push_as(&self, layout: &Path, name: &str, target: &str) -> anyhow::Result<()> {
        let output = Command::new(program("skopeo")?)
            .args([
                "copy",
                "--all",
                "--quiet",
                "--preserve-digests",
                "--dest-tls-verify=false",
                "--insecure-policy",
            ])
            .arg(format!("oci:{}:{name}", layout.display()))
            .arg(format!("docker://{}/{target}", self.address))
            .stdin(Stdio::null())
            .output()?;
        ensure!(output.status.success(), "skopeo: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// The certificate of a registry over TLS, PEM.
    pub fn certificate(&self) -> PathBuf {
        self.folder.path().join(CERTIFICATE_FILE)
    }

    /// Where the registry keeps its data.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
