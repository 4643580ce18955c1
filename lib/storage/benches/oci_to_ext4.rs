//! Times a base disk made from the layers of a real tree, against `tar x` of the same layers and against `tar x` with
//! `mke2fs -d` behind it, on the same disk in the same run.
//!
//! Prints one line per budget (name, ours, floor, ratio, limit, ok or MISS) and fails on a MISS.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use imp_storage::blob::digest::Digest;
use imp_storage::image::base::{BaseOptions, LayerSource, Limits, base_key, write_base};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ROUNDS: usize = 5;
/// What the layers hold, at least.
const BYTES: u64 = 320 << 20;
const FILES: usize = 10_000;
const LAYERS: usize = 3;
/// Set to a directory of layers, it makes this program build one disk there, in a process of its own.
const ONE_BUILD: &str = "IMP_BENCH_ONE_BUILD";
const MEBIBYTE: f64 = 1_048_576.0;

fn main() -> Result<ExitCode> {
    if let Some(directory) = std::env::var_os(ONE_BUILD) {
        one_build(Path::new(&directory))?;
        return Ok(ExitCode::SUCCESS);
    }
    // On disk, where a temporary directory may be in memory.
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    make_layers(place.path())?;

    let (mut ours, mut extract, mut mke2fs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ours.push(timed(place.path(), || one_build(place.path()))?);
        let tree = place.path().join("tree");
        std::fs::create_dir(&tree)?;
        extract.push(timed(place.path(), || {
            layers(place.path())
                .iter()
                .try_for_each(|layer| run(Command::new("tar").arg("-C").arg(&tree).arg("-xzf").arg(layer)))
        })?);
        let image = place.path().join("mke2fs.ext4");
        File::create(&image)?.set_len(1 << 30)?;
        mke2fs.push(timed(place.path(), || {
            run(Command::new("mke2fs")
                .args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d"])
                .arg(&tree)
                .arg(&image)
                .arg("1G"))
        })?);
        std::fs::remove_dir_all(&tree)?;
        std::fs::remove_file(&image)?;
    }
    let both: Vec<Duration> = extract.iter().zip(&mke2fs).map(|(tar, mke2fs)| *tar + *mke2fs).collect();
    let (ours, extract, both) = (median(ours), median(extract), median(both));
    let peak = peak_memory(place.path())?;
    let good = [
        line("oci-to-ext4 / tar x", "s", ours, extract, 1.0),
        line("oci-to-ext4 / tar x + mke2fs -d", "s", ours, both, 0.5),
        line("oci-to-ext4 peak memory / 200 MiB", "MiB", peak, 200.0, 1.0),
    ];
    Ok(if good.iter().all(|good| *good) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn line(name: &str, unit: &str, ours: f64, floor: f64, limit: f64) -> bool {
    let ratio = ours / floor;
    let good = ratio <= limit;
    let verdict = if good { "ok" } else { "MISS" };
    println!("{name:<36} {ours:>8.3} {unit:<3} {floor:>8.3} {unit:<3} {ratio:>6.2} {limit:>5.2} {verdict}");
    good
}

/// Splits files of this machine's /usr over layers as builders write them: sorted, gzip at its default level.
fn make_layers(directory: &Path) -> Result<()> {
    let mut waiting = vec![PathBuf::from("/usr/share"), PathBuf::from("/usr/lib"), PathBuf::from("/usr/bin")];
    let (mut files, mut bytes) = (Vec::new(), 0);
    while let Some(path) = waiting.pop() {
        let mut entries: Vec<_> = std::fs::read_dir(&path)?.collect::<std::io::Result<_>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                waiting.push(entry.path());
            } else if files.len() < FILES || bytes < BYTES {
                // Images hold many small files: few of the budget's bytes go to large ones while files are missing.
                if metadata.is_file() && (metadata.len() < 64 << 10 || files.len() >= FILES) {
                    bytes += metadata.len();
                    files.push(entry.path());
                }
            }
        }
    }
    if files.len() < FILES || bytes < BYTES {
        return Err(format!("/usr has only {} files of {bytes} bytes", files.len()).into());
    }
    println!("{} files, {:.0} MiB, {LAYERS} layers", files.len(), bytes as f64 / MEBIBYTE);
    for (number, part) in files.chunks(files.len().div_ceil(LAYERS)).enumerate() {
        let list = directory.join("list");
        let mut names = File::create(&list)?;
        for path in part {
            writeln!(names, "{}", path.strip_prefix("/")?.display())?;
        }
        let layer = directory.join(format!("layer-{number}.tar.gz"));
        run(Command::new("tar").args(["-C", "/", "-czf"]).arg(layer).arg("-T").arg(list))?;
    }
    Ok(())
}

fn layers(directory: &Path) -> Vec<PathBuf> {
    (0..LAYERS).map(|number| directory.join(format!("layer-{number}.tar.gz"))).collect()
}

fn one_build(directory: &Path) -> Result<()> {
    let layers: Vec<LayerSource> = layers(directory)
        .into_iter()
        .map(|path| LayerSource {
            media_type: "application/vnd.oci.image.layer.v1.tar+gzip".to_owned(),
            // Only its text is used.
            digest: Digest::of(path.as_os_str().as_encoded_bytes()),
            diff_id: None,
            path,
        })
        .collect();
    let options = BaseOptions { key: base_key(&layers), limits: Limits::default() };
    write_base(&layers, &directory.join("base.ext4"), &options, &mut |_| {})?;
    if std::env::var_os(ONE_BUILD).is_some() {
        print!("{}", std::fs::read_to_string("/proc/self/status")?);
    }
    Ok(())
}

/// MiB, of a process that builds one disk and nothing else.
fn peak_memory(directory: &Path) -> Result<f64> {
    let output = Command::new(std::env::current_exe()?).env(ONE_BUILD, directory).output()?;
    let status = String::from_utf8(output.stdout)?;
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM in /proc/self/status")?;
    let kibibytes: f64 = peak.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kibibytes / 1024.0)
}

/// Starts with nothing left to write from what came before.
fn timed(directory: &Path, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    run(Command::new("sync").arg("-f").arg(directory))?;
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(f64::NAN, Duration::as_secs_f64)
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}").into()) }
}
