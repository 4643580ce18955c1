//! An image: layers and the configuration that containers start with.

use serde_json::{Value, json};

use super::layer::Layer;

/// An image being built. What is not set stays absent from the configuration.
pub struct Image {
    pub(super) layers: Vec<Layer>,
    pub(super) config: serde_json::Map<String, Value>,
    pub(super) architecture: String,
    pub(super) os: String,
}

impl Default for Image {
    fn default() -> Self {
        Self::new()
    }
}

impl Image {
    /// An empty image for linux/amd64.
    pub fn new() -> Self {
        Self {
            layers: Vec::new(),
            config: serde_json::Map::new(),
            architecture: "amd64".to_owned(),
            os: "linux".to_owned(),
        }
    }

    pub fn layer(mut self, layer: Layer) -> Self {
        self.layers.push(layer);
        self
    }

    pub fn platform(mut self, os: &str, architecture: &str) -> Self {
        self.os = os.to_owned();
        self.architecture = architecture.to_owned();
        self
    }

    pub fn entrypoint(self, words: &[&str]) -> Self {
        self.set("Entrypoint", json!(words))
    }

    pub fn command(self, words: &[&str]) -> Self {
        self.set("Cmd", json!(words))
    }

    /// One more variable, `NAME=value`.
    pub fn env(mut self, variable: &str) -> Self {
        let variables = self.config.entry("Env").or_insert_with(|| json!([]));
        if let Value::Array(variables) = variables {
            variables.push(json!(variable));
        }
        self
    }

    pub fn user(self, user: &str) -> Self {
        self.set("User", json!(user))
    }

    pub fn working_directory(self, path: &str) -> Self {
        self.set("WorkingDir", json!(path))
    }

    pub fn stop_signal(self, signal: &str) -> Self {
        self.set("StopSignal", json!(signal))
    }

    /// One more port, e.g. `8080/tcp`.
    pub fn exposed_port(mut self, port: &str) -> Self {
        let ports = self.config.entry("ExposedPorts").or_insert_with(|| json!({}));
        if let Value::Object(ports) = ports {
            ports.insert(port.to_owned(), json!({}));
        }
        self
    }

    /// Any field of the configuration's `config` object.
    pub fn set(mut self, field: &str, value: Value) -> Self {
        self.config.insert(field.to_owned(), value);
        self
    }

    /// The configuration document, given the digests of the uncompressed layers.
    pub(super) fn configuration(&self, diff_ids: &[String]) -> Value {
        let history: Vec<Value> = diff_ids
            .iter()
            .enumerate()
            .map(|(number, _)| json!({ "created_by": format!("layer {number}") }))
            .collect();
        json!({
            "architecture": self.architecture,
            "os": self.os,
            "config": self.config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
            "history": history,
        })
    }
}
