//! `imp template serve`

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use imp_storage::snapshots::peer::PeerName;
use imp_storage::snapshots::peer::server::Server;
use tokio::net::TcpListener;

use super::carry;
use super::peer::Certificates;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::session::Interrupts;

/// Give templates to other machines while this command runs
///
/// They are spoken to over TLS 1.3, and must show a certificate with a name that --allow has. They take a template with
/// `imp template pull --peer`. Prints the address at which it listens; ctrl-c ends it.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Names, or the beginnings of digests; those that VMs and pools use are given away, too
    #[arg(value_name = "TEMPLATE")]
    templates: Vec<String>,
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    #[command(flatten)]
    certificates: Certificates,
    /// A DNS name of a machine that may have them, as in its certificate. May be repeated
    #[arg(long, required = true, value_name = "NAME")]
    allow: Vec<PeerName>,
}

impl Serve {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let credentials = self.certificates.load()?;
        let store = Arc::new(context.store()?);
        let find = |text: &String| anyhow::Ok(store.snapshots().hold(&carry::find(context, text)?)?);
        let offered = self.templates.iter().map(find).collect::<Result<_, _>>()?;
        let server = Server::offering(Arc::clone(&store), &credentials, self.allow, offered)?;
        context.block_on(async {
            let mut interrupts = Interrupts::catch()?;
            let listener = TcpListener::bind(self.listen).await;
            let listener = listener.with_context(|| format!("cannot listen on {}", self.listen))?;
            output::print(&format!("{}\n", listener.local_addr()?))?;
            tokio::select! {
                () = server.serve(listener) => {}
                _ = interrupts.next() => {}
            }
            Ok(0)
        })?
    }
}
