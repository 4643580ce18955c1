//! What the kernel's command line says to PID 1.

use std::path::PathBuf;

use crate::shutdown::PowerOff;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Error {
    #[error("imp.{0}= is missing")]
    Missing(&'static str),
    #[error("imp.{name}={value} is not understood")]
    Value { name: &'static str, value: String },
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CommandLine {
    /// Read-only disk with the image.
    pub(crate) base: PathBuf,
    /// The VM's private disk.
    pub(crate) scratch: PathBuf,
    pub(crate) channel: ChannelName,
    /// Name of the virtio-serial port that is the lane, where there is one.
    pub(crate) lane: Option<String>,
    /// How the machine ends, where the VMM wants something else than what the firmware offers: `imp.end=restart`.
    pub(crate) power_off: Option<PowerOff>,
    /// What the processor's timer counts in a second, where the VMM knows it better than a kernel that measures it.
    pub(crate) timer_hz: Option<u64>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChannelName {
    /// Name of a virtio-serial port.
    Port(String),
    /// Number of a vsock port: `vsock:10000`.
    Vsock(u32),
}

impl CommandLine {
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let value = |name: &'static str| {
            let words = text.split_ascii_whitespace().rev();
            let mut values =
                words.filter_map(|word| word.strip_prefix("imp.")?.strip_prefix(name)?.strip_prefix('='));
            values.next().filter(|value| !value.is_empty()).ok_or(Error::Missing(name))
        };
        let wrong = |name, value: &str| Error::Value { name, value: value.to_owned() };
        let device = |name| {
            let path = PathBuf::from(value(name)?);
            if path.is_absolute() { Ok(path) } else { Err(wrong(name, &path.display().to_string())) }
        };
        let channel = value("channel")?;
        let channel = match channel.strip_prefix("vsock:") {
            Some(port) => ChannelName::Vsock(port.parse().map_err(|_| wrong("channel", channel))?),
            None => ChannelName::Port(channel.to_owned()),
        };
        let power_off = match value("end") {
            Ok(way) => Some(PowerOff::parse(way).ok_or_else(|| wrong("end", way))?),
            Err(_) => None,
        };
        let timer_hz = match value("timer_hz") {
            Ok(hz) => Some(hz.parse().map_err(|_| wrong("timer_hz", hz))?),
            Err(_) => None,
        };
        let lane = value("lane").ok().map(str::to_owned);
        Ok(Self { base: device("base")?, scratch: device("scratch")?, channel, lane, power_off, timer_hz })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_names_disks_and_channel() {
        let text = "console=ttyS0 quiet imp.base=/dev/vdx imp.base=/dev/vda imp.scratch=/dev/vdb imp.channel=imp.agent.0\n";
        let parsed = CommandLine::parse(text).unwrap();
        assert_eq!(parsed.base, PathBuf::from("/dev/vda"));
        assert_eq!(parsed.scratch, PathBuf::from("/dev/vdb"));
        assert_eq!((parsed.channel, parsed.power_off), (ChannelName::Port("imp.agent.0".into()), None));
        assert_eq!((parsed.lane, parsed.timer_hz), (None, None));
        let text = "imp.base=/a imp.scratch=/b imp.channel=x imp.lane=imp.lane.0 imp.timer_hz=62500000";
        let parsed = CommandLine::parse(text).unwrap();
        assert_eq!((parsed.lane.as_deref(), parsed.timer_hz), (Some("imp.lane.0"), Some(62_500_000)));
        let text = "imp.base=/a imp.scratch=/b imp.channel=vsock:10000 imp.end=restart";
        let parsed = CommandLine::parse(text).unwrap();
        assert_eq!((parsed.channel, parsed.power_off), (ChannelName::Vsock(10_000), Some(PowerOff::Restart)));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let wrong = |text: &str| CommandLine::parse(text).unwrap_err().to_string();
        assert_eq!(wrong("imp.base=/a imp.channel=x"), "imp.scratch= is missing");
        assert_eq!(wrong("imp.base=a imp.scratch=/b imp.channel=x"), "imp.base=a is not understood");
        assert_eq!(
            wrong("imp.base=/a imp.scratch=/b imp.channel=vsock:x"),
            "imp.channel=vsock:x is not understood"
        );
        assert_eq!(
            wrong("imp.base=/a imp.scratch=/b imp.channel=x imp.end=y"),
            "imp.end=y is not understood"
        );
        assert_eq!(
            wrong("imp.base=/a imp.scratch=/b imp.channel=x imp.timer_hz=fast"),
            "imp.timer_hz=fast is not understood"
        );
    }
}
