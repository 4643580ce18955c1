//! Snapshots on their way: out of one store and into another, through files, a real registry and peers.

#[cfg(test)]
mod archive;
#[cfg(test)]
mod bases;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod peers;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod registry;
#[cfg(test)]
mod room;
#[cfg(test)]
mod sealed;
