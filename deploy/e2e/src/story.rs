//! How a test runs: alone, with a limit of time, with logs when it fails.

use std::io::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Longest that a test may take before it counts as hung. Far beyond what any needs on a slow machine.
const STORY_LIMIT: Duration = Duration::from_secs(600);

/// Longest that a condition is waited for; a loaded machine may stall for many seconds.
const PATIENCE: Duration = Duration::from_secs(90);

/// Between two looks at a condition.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Lines of a log that are worth showing.
const LOG_LINES: usize = 60;

/// One story at a time: each starts several processes that compute.
static STAGE: Mutex<()> = Mutex::new(());

/// What gateways of the running story said.
static LOGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Shows the logs unless the story ended well.
struct Curtain {
    failed: bool,
}

impl Drop for Curtain {
    fn drop(&mut self) {
        let logs = std::mem::take(&mut *LOGS.lock().unwrap_or_else(PoisonError::into_inner));
        if self.failed {
            for log in logs {
                let _ = writeln!(std::io::stderr().lock(), "{log}");
            }
        }
    }
}

/// Runs a test to its end.
///
/// # Errors
/// Those of the test, and when it hangs.
pub fn story<F>(test: impl FnOnce() -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    // A test that panicked on the stage left nothing there: its gateways are ended by their drop.
    let _alone = STAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut curtain = Curtain { failed: true };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let ended = runtime.block_on(async { tokio::time::timeout(STORY_LIMIT, test()).await });
    runtime.shutdown_background();
    let result = ended.unwrap_or_else(|_elapsed| {
        Err(anyhow::anyhow!(
            "the story hangs: it takes more than {STORY_LIMIT:?}"
        ))
    });
    curtain.failed = result.is_err();
    result
}

/// Keeps the end of a log until the story is over.
pub(crate) fn keep_log(title: &str, text: &str) {
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
    let mut logs = LOGS.lock().unwrap_or_else(PoisonError::into_inner);
    logs.push(format!("--- {title}\n{tail}\n---"));
}

/// Asks until the answer is `Some`.
///
/// # Errors
/// Those of the question, or that the answer never came.
pub async fn eventually<T>(
    what: &str,
    mut question: impl AsyncFnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = question().await? {
            return Ok(answer);
        }
        anyhow::ensure!(Instant::now() < end, "waited {PATIENCE:?} for {what}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
