//! What every command works with: the settings, this program, and the way to images and VMs.

use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::Context as _;
use imp_embedded::Owner;
use imp_embedded::start::{self, Starter, build_of};
use imp_storage::image::platform::Platform;
use imp_storage::store::{Store, StoreOptions};

use crate::args::Global;
use crate::commands::owner::serve::Serve;
use crate::settings::{Settings, World};

/// Runs a command that waits for others. One thread is enough: work that blocks has threads of its own.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> std::io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(work);
    // A thread that still reads stdin is not waited for.
    runtime.shutdown_background();
    Ok(result)
}

pub(crate) struct Context {
    pub(crate) settings: Settings,
    world: World,
}

impl Context {
    pub(crate) fn new(flags: &Global) -> anyhow::Result<Self> {
        let world = World::look().context("cannot find this program's own file")?;
        let flags = flags.clone().or_variables(|name| std::env::var_os(name));
        let mut settings = Settings::read(&flags, &world)?;
        // The owner works from another directory.
        let here = std::env::current_dir().unwrap_or_default();
        settings.layout.data = here.join(&settings.layout.data);
        settings.layout.runtime = here.join(&settings.layout.runtime);
        settings.guest_agent = here.join(&settings.guest_agent);
        for program in [&mut settings.firecracker, &mut settings.qemu].into_iter().flatten() {
            *program = here.join(&*program);
        }
        Ok(Self { settings, world })
    }

    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>) -> anyhow::Result<T> {
        block_on(work).context("no async runtime")
    }

    pub(crate) fn store(&self) -> anyhow::Result<Store> {
        let options = StoreOptions {
            size_limit: self.settings.image_size_limit,
            platform: Platform::host(),
            registries: self.settings.registries.clone(),
            ..StoreOptions::default()
        };
        Ok(Store::open(self.settings.layout.images(), options)?)
    }

    /// The owner, started if there is none.
    pub(crate) async fn owner(&self) -> anyhow::Result<Owner> {
        Ok(self.starter()?.owner().await?)
    }

    /// The owner if VMs may exist: none has been started since the machine came up when there is no record either.
    pub(crate) async fn owner_if_any(&self) -> anyhow::Result<Option<Owner>> {
        if start::find(&self.settings.layout).await?.is_none() && !self.settings.layout.vms().exists() {
            return Ok(None);
        }
        self.owner().await.map(Some)
    }

    /// Tells owners apart that would do the same differently: another program, other paths, another driver, or other
    /// networks.
    pub(crate) fn build(&self) -> anyhow::Result<String> {
        let settings = &self.settings;
        let mut paths = DefaultHasher::new();
        (&settings.layout.data, &settings.guest_agent, &settings.qemu).hash(&mut paths);
        (&settings.firecracker, format!("{:?} {:?}", settings.driver, settings.bridge)).hash(&mut paths);
        Ok(format!("{}-{:016x}", build_of(&self.world.program)?, paths.finish()))
    }

    fn starter(&self) -> anyhow::Result<Starter> {
        let settings = &self.settings;
        let build = self.build()?;
        let serve = Serve {
            layout: settings.layout.clone(),
            guest_agent: settings.guest_agent.clone(),
            driver: settings.driver,
            firecracker: settings.firecracker.clone(),
            qemu: settings.qemu.clone(),
            bridge: settings.bridge.clone(),
            idle_after: settings.owner_idle,
            build: build.clone(),
        };
        Ok(Starter {
            layout: settings.layout.clone(),
            program: self.world.program.clone(),
            arguments: serve.arguments(),
            build,
        })
    }
}
