//! Where the programs under test are.

use std::path::PathBuf;

use anyhow::Context as _;

/// Returns the path of a program of this workspace, built with the same profile as the running test.
///
/// # Errors
/// If it was not built; the text says how to build it.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    // The test runs as target/<profile>/deps/<test>-<hash>, the programs lie in target/<profile>.
    let own = std::env::current_exe().context("the test does not know its own path")?;
    let folder = own
        .parent()
        .and_then(|deps| deps.parent())
        .context("the test has no folder")?;
    let path = folder.join(name);
    anyhow::ensure!(
        path.is_file(),
        "{} is missing; build all programs first: cargo build --workspace \
         --features velox-gateway/fault-hooks,velox-kernel-worker/fault-hooks",
        path.display()
    );
    Ok(path)
}

/// Returns the path of a program that a plain build lacks, or says loudly that the test is skipped.
#[must_use]
pub fn optional_program(name: &str) -> Option<PathBuf> {
    let found = program(name).ok();
    if found.is_none() {
        skipped(&format!("{name} was not built"));
    }
    found
}

/// Written past the capture of the test harness: a skipped test must be seen.
fn skipped(why: &str) {
    use std::io::Write as _;
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {test}: {why}");
}

/// Returns the real model's file, or says loudly that the test is skipped.
#[must_use]
pub fn real_model() -> Option<PathBuf> {
    let path = std::env::var_os("VELOX_TEST_MODEL").filter(|path| !path.is_empty());
    if path.is_none() {
        skipped("VELOX_TEST_MODEL not set");
    }
    path.map(PathBuf::from)
}

/// Returns whether the slow variants are wanted.
#[must_use]
pub fn long_tests() -> bool {
    std::env::var_os("VELOX_LONG_TESTS").is_some_and(|value| value == "1")
}
