//! `imp cp`: files and trees between this machine and a VM, as docker copies them.

mod left_out;
mod pack;
mod place;
mod plan;
mod streams;
mod unpack;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use anyhow::{Context as _, bail};
use clap::Args;
use imp_protocol::connection::Connection;
use imp_protocol::guest::OpenArchive;
use imp_protocol::lane::Lane;
use imp_runtime::VmId;
use left_out::LeftOut;
use plan::Placement;

use crate::context::Context;
use crate::exit::{Outcome, own_output};

/// Copy files and directories between this machine and a VM
///
/// A file goes under the name DESTINATION, or into it if that is a directory. A directory becomes DESTINATION if that
/// does not exist, and goes into it otherwise; with `/.` at the end of SOURCE its contents go into it. `-` in the place
/// of a path here is a tar stream: from stdin it is unpacked in the directory of the VM, to stdout it holds the file, or
/// what is below the directory. Paths of a VM begin at its root. Sockets and devices are left out, with a
/// warning that names them; it is an error only if nothing else was asked for.
#[derive(Debug, Args)]
pub(crate) struct Cp {
    /// VM:PATH, PATH, or -
    source: OsString,
    /// VM:PATH, PATH, or -
    destination: OsString,
    /// Keep numeric owners; otherwise copies belong to root in the VM, and to you here
    #[arg(short, long)]
    archive: bool,
    /// If SOURCE is a symbolic link, copy what it leads to
    #[arg(short = 'L', long)]
    follow_link: bool,
}

/// Whose files they are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owners {
    Kept,
    /// Root in a VM, the user here.
    TheCopiers,
}

/// What is meant when the source is a symbolic link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    Followed,
    Copied,
}

impl Cp {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let ends = (End::parse(&self.source), End::parse(&self.destination));
        let owners = if self.archive { Owners::Kept } else { Owners::TheCopiers };
        let links = if self.follow_link { Links::Followed } else { Links::Copied };
        context.block_on(async {
            match ends {
                (End::Vm { vm, path }, here @ (End::Local(_) | End::Stream)) => {
                    out_of(Vm::find(context, &vm).await?, &path, here, owners, links).await
                }
                (here @ (End::Local(_) | End::Stream), End::Vm { vm, path }) => {
                    into(Vm::find(context, &vm).await?, here, &path, owners, links).await
                }
                (End::Vm { .. }, End::Vm { .. }) => {
                    bail!("copying from VM to VM takes a pipe: `imp cp ONE:PATH - | imp cp - OTHER:PATH`")
                }
                (End::Local(_) | End::Stream, End::Local(_) | End::Stream) => {
                    bail!("neither SOURCE nor DESTINATION is in a VM; write VM:PATH for the one that is")
                }
            }
        })??;
        Ok(0)
    }
}

/// The VM of a copy.
struct Vm {
    connection: Connection,
    id: VmId,
    lanes: PathBuf,
}

impl Vm {
    async fn find(context: &Context, name: &str) -> anyhow::Result<Self> {
        let owner = context.owner().await?;
        let id = owner.inspect(name).await?.id;
        Ok(Self { connection: owner.guest(&id), id, lanes: context.settings.layout.lane_socket() })
    }

    /// The way past HTTP/2, if it is there and free.
    async fn lane(&self) -> Option<Lane> {
        let (lanes, id) = (self.lanes.clone(), self.id.clone());
        tokio::task::spawn_blocking(move || Lane::ask(&lanes, id.as_str())).await.ok()?.ok()
    }

    async fn write(self, open: OpenArchive, packed: streams::Packed) -> anyhow::Result<LeftOut> {
        let lane = self.lane().await;
        streams::write(self.connection, lane, open, packed).await
    }
}

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Vm { vm: String, path: OsString },
    Local(OsString),
    Stream,
}

impl End {
    /// As docker tells them apart: what begins with '.' or '/' is here, whatever colons it has.
    fn parse(text: &OsStr) -> Self {
        use std::os::unix::ffi::OsStrExt;
        let bytes = text.as_bytes();
        if bytes == b"-" {
            return Self::Stream;
        }
        let colon = bytes.iter().position(|byte| *byte == b':');
        let vm = colon.and_then(|colon| bytes.get(..colon)).and_then(|vm| std::str::from_utf8(vm).ok());
        match (vm, colon) {
            (Some(vm), Some(colon)) if !vm.is_empty() && !vm.contains('/') && !vm.starts_with('.') => {
                let path = bytes.get(colon + 1..).unwrap_or_default();
                let slash: &[u8] = if path.starts_with(b"/") { b"" } else { b"/" };
                let path = [slash, path].concat();
                Self::Vm { vm: vm.to_owned(), path: OsStr::from_bytes(&path).to_owned() }
            }
            _ => Self::Local(text.to_owned()),
        }
    }
}

async fn out_of(vm: Vm, path: &OsStr, destination: End, owners: Owners, links: Links) -> anyhow::Result<()> {
    let (source, attributes) = place::source_in_vm(&vm.connection, path, links).await?;
    let lane = vm.lane().await;
    let chunks = streams::read(vm.connection, lane, path, links).await?;
    let sockets = chunks.left_out();
    let End::Local(destination) = destination else {
        if crate::terminal::is_terminal(io::stdout()) {
            bail!("a tar stream would garble the terminal: send it to a file or a program");
        }
        let copy = move || own_output(io::copy(&mut chunks.into_reader(), &mut io::stdout().lock()));
        tokio::task::spawn_blocking(copy).await?.context("cannot pass the archive on")?;
        sockets.lock().unwrap_or_else(PoisonError::into_inner).warn();
        return Ok(());
    };
    let placement = plan::plan(&source, &place::destination_here(&destination))?;
    let unpack = move || -> anyhow::Result<LeftOut> {
        let mut archive = chunks.into_reader();
        let left_out = match &placement {
            Placement::Contents { directory } => {
                // Nobody else's until it has the mode of its source.
                let own = match std::fs::DirBuilder::new().mode(0o700).create(directory) {
                    Ok(()) => Some(attributes),
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                    Err(error) => {
                        return Err(error).with_context(|| format!("cannot make {}", directory.display()));
                    }
                };
                unpack::unpack(&mut archive, directory, unpack::Into::Tree(own), owners)?
            }
            Placement::Entry { directory, name } => {
                unpack::unpack(&mut archive, directory, unpack::Into::Entry(name), owners)?
            }
        };
        streams::finish(&mut archive).context("the VM has not finished the archive")?;
        Ok(left_out)
    };
    let left_out = tokio::task::spawn_blocking(unpack).await??;
    sockets.lock().unwrap_or_else(PoisonError::into_inner).warn();
    left_out.warn();
    if source.kind == plan::Kind::File && left_out.is_something() {
        bail!("nothing was copied");
    }
    Ok(())
}

async fn into(vm: Vm, source: End, path: &OsStr, owners: Owners, links: Links) -> anyhow::Result<()> {
    let destination = place::destination_in_vm(&vm.connection, path).await?;
    let End::Local(source) = source else {
        if destination.kind != plan::Kind::Directory {
            bail!("{} is no directory of the VM; an archive is unpacked in one", Path::new(path).display());
        }
        return vm.write(open(&destination.path, owners), streams::Packed::Stdin).await.map(drop);
    };
    let (source, facts) = place::source_here(&source, links)?;
    match plan::plan(&facts, &destination)? {
        Placement::Contents { directory } => {
            let is_there = destination.kind == plan::Kind::Directory && directory == destination.path;
            let top = if is_there { streams::Top::AsItIs } else { streams::Top::AsSource };
            let packed = streams::Packed::Directory { directory: source, top };
            vm.write(open(&directory, owners), packed).await?.warn();
        }
        Placement::Entry { directory, name } => {
            let packed = streams::Packed::Entry { source, name };
            let left_out = vm.write(open(&directory, owners), packed).await?;
            left_out.warn();
            if left_out.is_something() {
                bail!("nothing was copied");
            }
        }
    }
    Ok(())
}

fn open(directory: &Path, owners: Owners) -> OpenArchive {
    use std::os::unix::ffi::OsStrExt;
    let root = match owners {
        Owners::Kept => None,
        Owners::TheCopiers => Some(0),
    };
    OpenArchive {
        path: bytes::Bytes::copy_from_slice(directory.as_os_str().as_bytes()),
        uid: root,
        gid: root,
        then_read_only: false,
        read_only_name: bytes::Bytes::new(),
        lane: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_names_a_vm_unless_the_path_is_clearly_here() {
        let vm = |vm: &str, path: &str| End::Vm { vm: vm.into(), path: path.into() };
        for (text, expected) in [
            ("web:/etc", vm("web", "/etc")),
            ("web:etc", vm("web", "/etc")),
            ("web:", vm("web", "/")),
            ("web:/a:b", vm("web", "/a:b")),
            ("./web:/etc", End::Local("./web:/etc".into())),
            ("/a:b", End::Local("/a:b".into())),
            ("a/b:c", End::Local("a/b:c".into())),
            (":x", End::Local(":x".into())),
            ("plain", End::Local("plain".into())),
            ("-", End::Stream),
        ] {
            assert_eq!(End::parse(text.as_ref()), expected, "{text}");
        }
    }
}
