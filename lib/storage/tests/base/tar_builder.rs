//! Writes tars field by field, good ones and bad ones.

/// One header, before it is written.
#[derive(Clone)]
pub(crate) struct Header {
    pub(crate) bytes: [u8; 512],
}

impl Header {
    pub(crate) fn new(flag: u8, path: &str) -> Self {
        let mut header = Self { bytes: [0; 512] };
        header.put(0, &path.as_bytes()[..path.len().min(100)]);
        header.mode(if flag == b'5' { 0o755 } else { 0o644 });
        header.octal(108, 8, 0);
        header.octal(116, 8, 0);
        header.size(0);
        header.octal(136, 12, 0);
        header.bytes[156] = flag;
        header.put(257, b"ustar\x0000");
        header
    }

    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) -> &mut Self {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub(crate) fn octal(&mut self, at: usize, length: usize, value: u64) -> &mut Self {
        let text = format!("{value:0width$o}\0", width = length - 1);
        self.put(at, text.as_bytes())
    }

    pub(crate) fn base256(&mut self, at: usize, length: usize, value: u64) -> &mut Self {
        let mut bytes = vec![0; length];
        bytes[length - 8..].copy_from_slice(&value.to_be_bytes());
        bytes[0] |= 0x80;
        self.put(at, &bytes)
    }

    pub(crate) fn mode(&mut self, mode: u64) -> &mut Self {
        self.octal(100, 8, mode)
    }

    pub(crate) fn size(&mut self, size: u64) -> &mut Self {
        self.octal(124, 12, size)
    }

    pub(crate) fn link(&mut self, target: &str) -> &mut Self {
        self.put(157, target.as_bytes())
    }

    pub(crate) fn device(&mut self, major: u64, minor: u64) -> &mut Self {
        self.octal(329, 8, major).octal(337, 8, minor)
    }

    fn sealed(&self) -> [u8; 512] {
        let mut bytes = self.bytes;
        bytes[148..156].copy_from_slice(b"        ");
        let sum: u64 = bytes.iter().map(|byte| u64::from(*byte)).sum();
        bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes
    }
}

#[derive(Clone, Default)]
pub(crate) struct Tar {
    pub(crate) bytes: Vec<u8>,
}

impl Tar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn header(mut self, header: &Header) -> Self {
        self.bytes.extend_from_slice(&header.sealed());
        self
    }

    pub(crate) fn data(mut self, data: &[u8]) -> Self {
        self.bytes.extend_from_slice(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn file(self, path: &str, data: impl AsRef<[u8]>) -> Self {
        let data = data.as_ref();
        self.long(path).header(Header::new(b'0', path).size(data.len() as u64)).data(data)
    }

    pub(crate) fn directory(self, path: &str) -> Self {
        self.long(path).header(&Header::new(b'5', path))
    }

    pub(crate) fn symlink(self, path: &str, target: &str) -> Self {
        if target.len() > 100 {
            return self.pax(&[("linkpath", target.as_bytes())]).header(&Header::new(b'2', path));
        }
        self.header(Header::new(b'2', path).link(target))
    }

    pub(crate) fn hard_link(self, path: &str, target: &str) -> Self {
        self.header(Header::new(b'1', path).link(target))
    }

    pub(crate) fn whiteout(self, path: &str) -> Self {
        let (above, name) = path.rsplit_once('/').map_or(("", path), |(above, name)| (above, name));
        self.file(&format!("{above}/.wh.{name}"), "")
    }

    pub(crate) fn opaque(self, path: &str) -> Self {
        self.file(&format!("{path}/.wh..wh..opq"), "")
    }

    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut bytes = Vec::new();
        for (key, value) in records {
            bytes.extend_from_slice(&record(key, value));
        }
        self.header(Header::new(b'x', "pax").size(bytes.len() as u64)).data(&bytes)
    }

    /// A GNU long name (`L`) or long link (`K`).
    pub(crate) fn gnu_long(self, flag: u8, text: &str) -> Self {
        let mut header = Header::new(flag, "././@LongLink");
        header.size(text.len() as u64 + 1).put(257, b"ustar  \0");
        self.header(&header).data(&[text.as_bytes(), b"\0"].concat())
    }

    fn long(self, path: &str) -> Self {
        if path.len() > 100 { self.pax(&[("path", path.as_bytes())]) } else { self }
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 1024, 0);
        self.bytes
    }
}

/// One record of an extended header.
pub(crate) fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    [format!("{length} {key}=").as_bytes(), value, b"\n"].concat()
}
