//! The commands that a template begins with.

use imp_protocol::connection::Connection;

use super::InitCommand;
use super::guest::{self, End};
use crate::spec::MainProcess;
use crate::status::Failure;

pub(crate) async fn run(
    connection: &Connection,
    command: &InitCommand,
    main: &MainProcess,
) -> Result<(), Failure> {
    let done = guest::run(connection, &command.arguments, main, command.at_most).await;
    if done.end == End::Code(0) {
        return Ok(());
    }
    Err(Failure::Init {
        command: command.arguments.to_string(),
        outcome: done.end.to_string(),
        output: done.output,
    })
}
