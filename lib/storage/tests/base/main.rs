//! Layers in, a checked file system out: every image made here passes `e2fsck -fn` and is read back.

#[cfg(test)]
mod attributes;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod ext4_reader;
#[cfg(test)]
mod formats;
#[cfg(test)]
mod links;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod sizes;
#[cfg(test)]
mod support;
#[cfg(test)]
mod tar_builder;
#[cfg(test)]
mod whiteouts;
