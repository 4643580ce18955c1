//! Which modules a guest or a node VM gets, and the order in which they load.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use object::{Object as _, ObjectSection as _};

use super::initramfs::Part;

/// What a guest needs before it can do anything: the devices of its VMM, its channel, its root.
const BOOT: &[&str] = &[
    "virtio_mmio",
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "vmw_vsock_virtio_transport",
    "virtio_rng",
    "virtio_balloon",
    "overlay",
];

/// What Docker, containerd and Podman need on top: bridges, network address translation in both its interfaces, tunnels.
const CONTAINERS: &[&str] = &[
    "bridge",
    "br_netfilter",
    "veth",
    "tun",
    "vxlan",
    "nf_tables",
    "nft_chain_nat",
    "nft_compat",
    "nft_ct",
    "nft_fib_inet",
    "nft_masq",
    "nft_nat",
    "nft_reject_inet",
    "ip_tables",
    "iptable_filter",
    "iptable_nat",
    "ip6_tables",
    "ip6table_filter",
    "ip6table_nat",
    "xt_addrtype",
    "xt_comment",
    "xt_conntrack",
    "xt_mark",
    "xt_MASQUERADE",
    "xt_multiport",
    "xt_nat",
    "xt_tcpudp",
];

/// What a node VM of the tests needs before it can do anything: the devices of its VMM, its root, VMs of its own.
const NODE: &[&str] = &["virtio_blk", "virtio_net", "overlay", "tun", "kvm_amd"];

/// What programs in a node may ask for on top of containers: firewalls, traffic control, disks from files.
const ISOLATION: &[&str] = &[
    "act_police",
    "cls_u32",
    "dummy",
    "loop",
    "nf_conntrack_netlink",
    "nfnetlink_log",
    "nfnetlink_queue",
    "nft_connlimit",
    "nft_fwd_netdev",
    "nft_limit",
    "nft_log",
    "nft_numgen",
    "nft_queue",
    "nft_quota",
    "nft_redir",
    "nft_socket",
    "nft_tproxy",
    "sch_ingress",
    "sch_tbf",
];

/// The archive of a guest's bundle, from the modules of one kernel: the folder `lib/modules/<release>`.
pub(super) fn for_guests(tree: &Path) -> anyhow::Result<Vec<u8>> {
    let modules = Available::find(tree)?.read_all(&[BOOT, CONTAINERS])?;
    let dependencies = dependencies_of(&modules);
    let mut loaded = BTreeSet::new();
    let mut part = files(&modules)?;
    part.file("modules.list", list(&load_order(BOOT, &dependencies, &mut loaded)).as_bytes())?;
    part.file("containers.list", list(&load_order(CONTAINERS, &dependencies, &mut loaded)).as_bytes())?;
    Ok(part.finish()?)
}

/// The same for a node's bundle. A node loads most modules when something asks for them, as an installed system does,
/// because under emulation loading all of them takes as long as the rest of the boot.
pub(super) fn for_nodes(tree: &Path) -> anyhow::Result<Vec<u8>> {
    let modules = Available::find(tree)?.read_all(&[NODE, BOOT, CONTAINERS, ISOLATION])?;
    let dependencies = dependencies_of(&modules);
    let mut part = files(&modules)?;
    part.file("modules.list", list(&load_order(NODE, &dependencies, &mut BTreeSet::new())).as_bytes())?;
    part.file("modules.index", index(&modules, &dependencies).as_bytes())?;
    Ok(part.finish()?)
}

/// One line per module: the modules to load, in order, itself last, joined by commas; then the names besides its own by
/// which the kernel asks for it, which may hold `*`.
fn index(modules: &BTreeMap<String, Module>, dependencies: &Dependencies) -> String {
    let line = |(name, module): (&String, &Module)| {
        let order = load_order(&[name.as_str()], dependencies, &mut BTreeSet::new()).join(",");
        let aliases = module.aliases.iter().map(|alias| format!(" {alias}"));
        format!("{order}{}\n", aliases.collect::<String>())
    };
    modules.iter().map(line).collect()
}

fn files(modules: &BTreeMap<String, Module>) -> io::Result<Part> {
    let mut part = Part::default();
    part.directory("modules")?;
    for (name, module) in modules {
        part.file(&format!("modules/{name}.ko"), &module.content)?;
    }
    Ok(part)
}

fn dependencies_of(modules: &BTreeMap<String, Module>) -> Dependencies {
    modules.iter().map(|(name, module)| (name.clone(), module.depends.clone())).collect()
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| format!("/modules/{name}.ko\n")).collect()
}

/// Modules by their normal name; those that the kernel has built in are absent.
type Dependencies = BTreeMap<String, Vec<String>>;

/// `wanted` and what they depend on, each after its dependencies, without those in `loaded`, to which they are added.
fn load_order(wanted: &[&str], dependencies: &Dependencies, loaded: &mut BTreeSet<String>) -> Vec<String> {
    let mut order = Vec::new();
    for name in wanted {
        visit(&normal(name), dependencies, loaded, &mut order);
    }
    order
}

fn visit(name: &str, dependencies: &Dependencies, loaded: &mut BTreeSet<String>, order: &mut Vec<String>) {
    let Some(depends) = dependencies.get(name) else { return };
    if !loaded.insert(name.to_owned()) {
        return;
    }
    for dependency in depends {
        visit(dependency, dependencies, loaded, order);
    }
    order.push(name.to_owned());
}

/// File names have dashes or underscores as their authors liked; the kernel knows underscores only.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

struct Module {
    content: Vec<u8>,
    depends: Vec<String>,
    aliases: Vec<String>,
}

/// What the package offers.
struct Available {
    files: BTreeMap<String, PathBuf>,
    built_in: BTreeSet<String>,
}

impl Available {
    fn find(tree: &Path) -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        find_files(&tree.join("kernel"), &mut files)?;
        let list = tree.join("modules.builtin");
        let list = fs::read_to_string(&list).with_context(|| format!("reading {}", list.display()))?;
        Ok(Self { files, built_in: list.lines().filter_map(module_name).collect() })
    }

    /// Reads the modules and all that they depend on.
    fn read_all(&self, lists: &[&[&str]]) -> anyhow::Result<BTreeMap<String, Module>> {
        let mut modules = BTreeMap::new();
        for name in lists.iter().flat_map(|list| *list) {
            self.read(&normal(name), &mut modules)?;
        }
        Ok(modules)
    }

    /// Reads the module and all that it depends on into `modules`.
    fn read(&self, name: &str, modules: &mut BTreeMap<String, Module>) -> anyhow::Result<()> {
        if modules.contains_key(name) || self.built_in.contains(name) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            bail!(
                "the kernel has no module {name}: correct the lists at the top of xtask's kernel/modules.rs"
            );
        };
        let module = Module::read(path).with_context(|| format!("reading the module {}", path.display()))?;
        let depends = module.depends.clone();
        modules.insert(name.to_owned(), module);
        depends.iter().try_for_each(|dependency| self.read(dependency, modules))
    }
}

impl Module {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let mut content = fs::read(path)?;
        if path.extension().is_some_and(|extension| extension == "xz") {
            let mut unpacked = Vec::new();
            liblzma::bufread::XzDecoder::new(content.as_slice()).read_to_end(&mut unpacked)?;
            content = unpacked;
        }
        let elf = object::File::parse(content.as_slice())?;
        let info = elf.section_by_name(".modinfo").context("it has no .modinfo")?.uncompressed_data()?;
        let (depends, aliases) = (depends(&info), aliases(&info));
        Ok(Self { content, depends, aliases })
    }
}

/// The `depends=` record of a module's information.
fn depends(info: &[u8]) -> Vec<String> {
    let names = records(info, "depends=").flat_map(|names| names.split(','));
    names.filter(|name| !name.is_empty()).map(normal).collect()
}

/// The `alias=` records, each a pattern of names by which the kernel asks for the module.
fn aliases(info: &[u8]) -> Vec<String> {
    records(info, "alias=").filter(|alias| !alias.contains(char::is_whitespace)).map(normal).collect()
}

/// Values of one name in a module's NUL-separated information.
fn records<'a>(info: &'a [u8], name: &'a str) -> impl Iterator<Item = &'a str> {
    let records = info.split(|byte| *byte == 0).filter_map(|record| std::str::from_utf8(record).ok());
    records.filter_map(move |record| record.strip_prefix(name))
}

fn find_files(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            find_files(&entry.path(), files)?;
        } else if let Some(name) = entry.file_name().to_str().and_then(module_name) {
            files.insert(name, entry.path());
        }
    }
    Ok(())
}

/// `kernel/drivers/char/virtio-rng.ko.xz` is `virtio_rng`; a file that is no module has no name.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit_once('/').map_or(path, |(_, file)| file);
    let name = file.strip_suffix(".xz").unwrap_or(file).strip_suffix(".ko")?;
    Some(normal(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dependencies(rows: &[(&str, &[&str])]) -> Dependencies {
        rows.iter()
            .map(|(name, on)| ((*name).to_owned(), on.iter().map(|name| (*name).to_owned()).collect()))
            .collect()
    }

    #[test]
    fn a_module_loads_after_what_it_depends_on_and_once() {
        let dependencies = dependencies(&[
            ("net", &["net_failover"]),
            ("net_failover", &["failover"]),
            ("failover", &[]),
            ("tap", &["failover"]),
        ]);
        let mut loaded = BTreeSet::new();
        assert_eq!(load_order(&["net"], &dependencies, &mut loaded), ["failover", "net_failover", "net"]);
        assert_eq!(load_order(&["net", "tap"], &dependencies, &mut loaded), ["tap"]);
    }

    #[test]
    fn what_is_built_into_the_kernel_is_not_loaded() {
        let dependencies = dependencies(&[("blk", &["virtio"])]);
        assert_eq!(load_order(&["blk", "ext4"], &dependencies, &mut BTreeSet::new()), ["blk"]);
    }

    #[test]
    fn a_module_is_known_by_the_name_that_the_kernel_gives_it() {
        assert_eq!(module_name("kernel/drivers/char/virtio-rng.ko.xz").as_deref(), Some("virtio_rng"));
        assert_eq!(module_name("kernel/fs/ext4/ext4.ko").as_deref(), Some("ext4"));
        assert_eq!(module_name("modules.order"), None);
    }

    #[test]
    fn dependencies_are_read_from_the_module_itself() {
        assert_eq!(
            depends(b"license=GPL\0depends=net-failover,virtio\0name=net\0"),
            ["net_failover", "virtio"]
        );
        assert!(depends(b"license=GPL\0depends=\0").is_empty());
    }

    #[test]
    fn the_index_says_what_to_load_for_each_name() {
        let module = |depends: &[&str], aliases: &[&str]| Module {
            content: Vec::new(),
            depends: depends.iter().map(|name| (*name).to_owned()).collect(),
            aliases: aliases.iter().map(|name| (*name).to_owned()).collect(),
        };
        let modules = BTreeMap::from([
            ("loop".to_owned(), module(&[], &["block_major_7_*"])),
            ("nft_ct".to_owned(), module(&["nf_tables"], &["nft_expr_ct"])),
            ("nf_tables".to_owned(), module(&["nfnetlink"], &[])),
        ]);
        let index = index(&modules, &dependencies_of(&modules));
        assert_eq!(index, "loop block_major_7_*\nnf_tables\nnf_tables,nft_ct nft_expr_ct\n");
        assert_eq!(aliases(b"alias=nft-expr-ct\0alias=a b\0name=x\0"), ["nft_expr_ct"]);
    }
}
