//! What the operating system knows of processes. Counting needs `/proc`; elsewhere it answers `None`.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// Whether the system has `/proc`.
#[must_use]
pub fn can_count() -> bool {
    Path::new("/proc/self/fd").is_dir()
}

/// Sends a signal.
///
/// # Errors
/// If the process is gone.
pub fn signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    kill_process(raw(pid)?, signal).with_context(|| format!("process {pid} takes no signal"))
}

/// Returns whether a process exists and is more than an unreaped entry in the table of processes.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    if can_count() {
        return stat(pid).is_some_and(|stat| stat.state != 'Z');
    }
    raw(pid).is_ok_and(|pid| test_kill_process(pid).is_ok())
}

/// Returns the children of a process.
#[must_use]
pub fn children(parent: u32) -> Option<BTreeSet<u32>> {
    Some(
        pids()?
            .filter(|&pid| stat(pid).is_some_and(|stat| stat.parent == parent))
            .collect(),
    )
}

/// Returns the processes that were started with a variable of this value.
#[must_use]
pub fn with_variable(name: &str, value: &str) -> Option<BTreeSet<u32>> {
    let wanted = format!("{name}={value}");
    let has_it = |pid: u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment
            .split(|&byte| byte == 0)
            .any(|variable| variable == wanted.as_bytes())
    };
    Some(pids()?.filter(|&pid| has_it(pid)).collect())
}

/// Returns the number of open descriptors of a process.
#[must_use]
pub fn descriptors(pid: u32) -> Option<usize> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    Some(entries.count())
}

/// Returns what lies in the folder of named shared memory and has a name of ours.
#[must_use]
pub fn shared_memory_names() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.contains("velox")).collect()
}

/// Every process of the machine.
fn pids() -> Option<impl Iterator<Item = u32>> {
    let entries = std::fs::read_dir("/proc").ok()?;
    Some(
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok()),
    )
}

struct Stat {
    state: char,
    parent: u32,
}

/// Reads `/proc/PID/stat`: "pid (name) state parent ...", where the name may contain anything.
fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_name, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some(Stat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
    })
}

fn raw(pid: u32) -> anyhow::Result<Pid> {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .with_context(|| format!("{pid} is no process"))
}
