//! Programs of a real image that go on in machines of their own: what they draw differs, and what depends on the time works.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use imp_testkit::images;
use imp_testkit::imp::Imp;
use imp_testkit::machine::program;

use super::promises::driver::on_driver;
use crate::DRIVER;

const IMAGE: &str = "imp.test/python";
const DAY: u64 = 24 * 3600;

fn with_python() -> anyhow::Result<Imp> {
    let imp = Imp::new(DRIVER)?;
    imp.run(["image", "import", &format!("oci:{}", images::python()?.display())])?.good()?;
    Ok(imp)
}

/// What the program draws out of Python's generator, out of OpenSSL's, and out of the one that nobody tells of anything.
fn draws(imp: &Imp, vm: &str) -> anyhow::Result<[String; 3]> {
    let ask =
        "rm -f /tmp/drawn; echo >/tmp/ask; until [ -e /tmp/drawn ]; do sleep 0.05; done; cat /tmp/drawn";
    let drawn = imp.run(["exec", vm, "sh", "-c", ask])?.good()?;
    let numbers: Vec<String> = drawn.split_whitespace().map(str::to_owned).collect();
    numbers.try_into().ok().with_context(|| drawn)
}

#[test]
fn a_warm_python_draws_other_numbers_in_each_machine_when_a_hook_of_its_image_tells_it() -> anyhow::Result<()>
{
    on_driver(|| {
        let imp = with_python()?;
        let build = ["template", "build", "-q", "--network", "none", "-m", "192m", "--wait-log", "warm"];
        imp.run(build.iter().chain(&["warm", IMAGE, "--", "/srv/app/draw.py"]))?.good()?;
        let mut drawn = Vec::new();
        for vm in ["one", "two"] {
            imp.run(["run", "-d", "--template", "warm", "--name", vm])?.good()?;
            drawn.push(draws(&imp, vm)?);
        }
        imp.run(["fork", "-n", "2", "--name", "child", "one"])?.good()?;
        let of = |drawn: &[[String; 3]], which: usize| -> BTreeSet<String> {
            drawn.iter().filter_map(|numbers| numbers.get(which)).cloned().collect()
        };
        // Only what nobody is told of goes on as it was.
        ensure!((of(&drawn, 0).len(), of(&drawn, 1).len(), of(&drawn, 2).len()) == (2, 2, 1), "{drawn:?}");
        for vm in ["child-1", "child-2", "one"] {
            drawn.push(draws(&imp, vm)?);
        }
        ensure!((of(&drawn, 0).len(), of(&drawn, 1).len(), of(&drawn, 2).len()) == (5, 5, 2), "{drawn:?}");
        imp.end()
    })
}

/// A server and its client in one process, which says what the one heard from the other.
const TLS: &str = r#"
import socket, ssl, threading
server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
server.load_cert_chain("/tmp/tls.pem")
client = ssl.create_default_context(cafile="/tmp/tls.pem")
here, there = socket.socketpair()
def serve():
    try:
        server.wrap_socket(there, server_side=True).sendall(b"hello")
    except OSError:
        pass
threading.Thread(target=serve, daemon=True).start()
print(client.wrap_socket(here, server_hostname="server.example").recv(5).decode())
"#;

/// A certificate that is valid from now on, with its key.
fn certificate(imp: &Imp) -> anyhow::Result<String> {
    let words =
        ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"];
    let names = ["-subj", "/CN=server", "-addext", "subjectAltName=DNS:server.example"];
    let (key, certificate) = (imp.folder().join("tls.key"), imp.folder().join("tls.pem"));
    let files = [("-keyout", &key), ("-out", &certificate)];
    let mut openssl = Command::new(program("openssl")?);
    openssl.args(words).args(names);
    for (flag, file) in files {
        openssl.arg(flag).arg(file);
    }
    let output = openssl.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(fs::read_to_string(key)? + &fs::read_to_string(certificate)?)
}

#[test]
fn tls_works_at_once_in_a_machine_of_a_template_that_is_three_days_old() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = with_python()?;
        let aged = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() - 3 * DAY;
        let date = format!("date -s @{aged}");
        let write = format!("cat >/tmp/tls.pem <<'END'\n{}END", certificate(&imp)?);
        let script = format!("cat >/tmp/tls.py <<'END'\n{TLS}END");
        // By its own clock the certificate is one of the future.
        let refused = "python3 /tmp/tls.py 2>&1 | grep 'certificate is not yet valid'";
        let mut line =
            ["template", "build", "-q", "--network", "none", "-m", "192m", "--user", "root"].to_vec();
        for init in [&date, &write, &script, refused] {
            line.extend(["--init", init]);
        }
        line.extend(["old", IMAGE, "--", "-c", "import time; time.sleep(100000)"]);
        imp.run(&line)?.good()?;
        imp.run(["run", "-d", "--template", "old", "--name", "vm"])?.good()?;
        assert_eq!(imp.run(["exec", "vm", "python3", "/tmp/tls.py"])?.good()?, "hello\n");
        imp.end()
    })
}
