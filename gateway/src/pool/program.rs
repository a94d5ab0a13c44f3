//! Which executable the workers are: the one with MLX where that loads, else the plain one, which is told why.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that the executable with MLX gets to load its libraries and look at its devices.
const CHECK_LIMIT: Duration = Duration::from_secs(20);

/// Between two looks at it.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Most bytes of its complaint that are kept.
const MAX_REASON_BYTES: usize = 2000;

/// Time that its last words have to arrive once it has ended.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(200);

/// An executable and what it must be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerProgram {
    /// Where it lies.
    pub path: PathBuf,
    /// Why it is not the one with MLX; `None` if it is, or if somebody named it.
    pub why_no_mlx: Option<String>,
}

impl WorkerProgram {
    /// Takes the executable that somebody named.
    #[must_use]
    pub fn given(path: PathBuf) -> Self {
        Self {
            path,
            why_no_mlx: None,
        }
    }

    /// Tries the executable with MLX: its libraries are linked when it is loaded, so they may be missing or of another
    /// version although it is there. Blocks for as long as that takes, once per gateway.
    #[must_use]
    pub fn choose(with_mlx: PathBuf, plain: PathBuf) -> Self {
        match check(&with_mlx) {
            Ok(()) => Self::given(with_mlx),
            Err(why) => Self {
                path: plain,
                why_no_mlx: Some(why),
            },
        }
    }
}

/// Runs the executable's own check.
fn check(program: &Path) -> Result<(), String> {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    if !program.exists() {
        return Err(format!("{name} is not installed beside the gateway"));
    }
    let mut child = Command::new(program)
        .arg("--check")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{name} does not start: {error}"))?;
    let complaint = Arc::new(Mutex::new(Vec::new()));
    let reader = child.stderr.take().map(|stderr| {
        let complaint = Arc::clone(&complaint);
        // Not joined: a process that it left behind could hold the pipe open for ever.
        std::thread::spawn(move || keep_tail(stderr, &complaint))
    });
    let started = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if started.elapsed() < CHECK_LIMIT => std::thread::sleep(POLL_INTERVAL),
            stuck => {
                // Reaped, so that nothing of it is left.
                let _ = child.kill();
                let _ = child.wait();
                return Err(match stuck {
                    Err(error) => format!("{name} cannot be waited for: {error}"),
                    Ok(_) => format!("{name} did not answer within {CHECK_LIMIT:?}"),
                });
            }
        }
    };
    let ended = Instant::now();
    while reader.as_ref().is_some_and(|reader| !reader.is_finished())
        && ended.elapsed() < LAST_WORDS_LIMIT
    {
        std::thread::sleep(POLL_INTERVAL);
    }
    let complaint = complaint.lock().unwrap_or_else(PoisonError::into_inner);
    let complaint = String::from_utf8_lossy(&complaint);
    verdict(&name, status, &complaint)
}

/// Reads to the end and keeps the last [`MAX_REASON_BYTES`]: the last line tells.
fn keep_tail(mut stderr: ChildStderr, complaint: &Mutex<Vec<u8>>) {
    let mut part = [0; 4096];
    while let Ok(length @ 1..) = stderr.read(&mut part) {
        let mut kept = complaint.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(&part[..length]);
        let excess = kept.len().saturating_sub(MAX_REASON_BYTES);
        kept.drain(..excess);
    }
}

fn verdict(name: &str, status: ExitStatus, complaint: &str) -> Result<(), String> {
    let last = complaint.lines().rfind(|line| !line.trim().is_empty());
    match (status.success(), last) {
        (true, _) => Ok(()),
        (false, Some(line)) => Err(format!("{name}: {}", line.trim())),
        (false, None) => Err(format!("{name} ended with {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds a program of the system, which knows nothing of us.
    fn program(name: &str) -> PathBuf {
        let folders = [Path::new("/bin"), Path::new("/usr/bin")];
        let mut found = folders.iter().map(|folder| folder.join(name));
        found.find(|path| path.exists()).unwrap()
    }

    #[test]
    fn what_starts_is_taken_and_what_does_not_says_why() {
        let plain = PathBuf::from("plain");
        let choose = |with_mlx: PathBuf| WorkerProgram::choose(with_mlx, plain.clone());
        let good = program("true");
        assert_eq!(choose(good.clone()), WorkerProgram::given(good));
        let missing = choose(PathBuf::from("/nowhere/with-mlx"));
        assert_eq!(missing.path, plain);
        assert_eq!(
            missing.why_no_mlx.as_deref(),
            Some("with-mlx is not installed beside the gateway")
        );
        // It complains of an argument that it does not know, as a loader complains of a library.
        let complaint = choose(program("ls")).why_no_mlx.unwrap();
        assert!(
            complaint.starts_with("ls: ") && complaint.len() > 4,
            "{complaint}"
        );
        let silent = choose(program("false")).why_no_mlx.unwrap();
        assert!(silent.contains("exit status: 1"), "{silent}");
        // A folder cannot be executed.
        let folder = choose(PathBuf::from("/")).why_no_mlx.unwrap();
        assert!(folder.contains("does not start"), "{folder}");
    }

    #[test]
    fn the_last_line_of_a_complaint_tells() {
        use std::os::unix::process::ExitStatusExt as _;
        let complaint = "warming up\nlibmlx.so: cannot open shared object file\n\n";
        let failed = ExitStatus::from_raw(127 << 8);
        assert_eq!(
            verdict("with-mlx", failed, complaint),
            Err("with-mlx: libmlx.so: cannot open shared object file".to_owned())
        );
        let killed = ExitStatus::from_raw(9);
        let why = verdict("with-mlx", killed, "").unwrap_err();
        assert!(why.contains("signal: 9"), "{why}");
        assert_eq!(
            verdict("with-mlx", ExitStatus::from_raw(0), complaint),
            Ok(())
        );
    }
}
