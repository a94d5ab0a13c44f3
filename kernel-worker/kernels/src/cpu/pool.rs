//! A pool of exactly N threads, the caller included.
//!
//! An op is cut into chunks whose borders do not depend on the number of threads; each thread takes the next chunk
//! from a counter, so a thread that the system delays holds nobody up for longer than its own chunk. Which thread
//! computes a chunk changes nothing in it.
//!
//! Workers spin for a moment between ops, because the next one usually follows within microseconds, then park:
//! spinning threads slow each other down when cores are shared.

use std::any::Any;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Checks of a counter before a thread parks, some tens of microseconds.
const SPINS: usize = 4_000;

/// One thread and its helpers. Dropping the pool ends them.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    /// Number of the current op; workers wait for it to change.
    generation: AtomicUsize,
    /// Next chunk of the current op.
    next: AtomicUsize,
    /// Workers inside the current op.
    running: AtomicUsize,
    state: Mutex<State>,
    started: Condvar,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct State {
    job: Option<Job>,
    stopping: bool,
    panic: Option<PanicPayload>,
}

struct PanicPayload(Box<dyn Any + Send>);

impl std::fmt::Debug for PanicPayload {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PanicPayload")
    }
}

/// An op whose borrows are hidden from the type; see [`Pool::run`] for why it does not outlive them.
#[derive(Clone, Copy)]
struct Job {
    work: &'static (dyn Fn(usize) + Sync),
    chunks: usize,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Job")
            .field("chunks", &self.chunks)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Starts `threads - 1` workers.
    ///
    /// # Errors
    /// What the system says when it cannot start a thread.
    pub fn new(threads: NonZeroUsize) -> io::Result<Self> {
        let mut pool = Self {
            shared: Arc::new(Shared {
                generation: AtomicUsize::new(0),
                next: AtomicUsize::new(0),
                running: AtomicUsize::new(0),
                state: Mutex::default(),
                started: Condvar::new(),
                finished: Condvar::new(),
            }),
            workers: Vec::new(),
            turn: Mutex::new(()),
        };
        for number in 1..threads.get() {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("velox-cpu-{number}"))
                .spawn(move || shared.serve())?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Returns the number of threads, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` once for each chunk below `chunks` and returns when all calls have.
    ///
    /// # Panics
    /// With the payload of a call that panicked, after every thread has left the op.
    pub fn run(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || chunks <= 1 {
            (0..chunks).for_each(work);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime changes. A worker copies the reference out of `State::job` under the lock, where it
        // counts itself into `running`, and drops the copy before it counts itself out. `finish` empties `State::job`
        // under the lock and does not return before `running` is 0; it runs also when the caller's own share panics,
        // which is caught. So no use outlives this call and with it the borrow.
        let work = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(work)
        };
        let job = Job { work, chunks };
        self.shared.start(job);
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.take_chunks(job)));
        let theirs = self.shared.finish();
        if let Err(payload) = own {
            resume_unwind(payload);
        }
        if let Some(PanicPayload(payload)) = theirs {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        // SYNC POINT: pairs with the loads in `next_job`.
        self.shared.generation.fetch_add(1, Ordering::Release);
        self.shared.started.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a job, so joining cannot fail with one that matters.
            let _ = worker.join();
        }
    }
}

// === impl Shared ===

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, job: Job) {
        let mut state = self.lock();
        state.job = Some(job);
        // Relaxed: a worker reads it after it has taken the job from behind the lock.
        self.next.store(0, Ordering::Relaxed);
        // SYNC POINT: pairs with the loads in `next_job`.
        self.generation.fetch_add(1, Ordering::Release);
        drop(state);
        self.started.notify_all();
    }

    fn take_chunks(&self, job: Job) {
        loop {
            // Relaxed: the counter only divides the work; the lock and `running` order memory.
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= job.chunks {
                return;
            }
            (job.work)(chunk);
        }
    }

    /// Ends the op: a worker that has not woken up yet is not waited for and will not see it any more.
    fn finish(&self) -> Option<PanicPayload> {
        self.lock().job = None;
        for _ in 0..SPINS {
            // SYNC POINT: pairs with the decrement in `serve`: what workers wrote is visible after it.
            if self.running.load(Ordering::Acquire) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = self.lock();
        // SYNC POINT: as above.
        while self.running.load(Ordering::Acquire) != 0 {
            state = self
                .finished
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.panic.take()
    }

    fn next_job(&self, seen: &mut usize) -> Option<Job> {
        loop {
            for _ in 0..SPINS {
                // SYNC POINT: pairs with the additions in `start` and `drop`.
                if self.generation.load(Ordering::Acquire) != *seen {
                    break;
                }
                std::hint::spin_loop();
            }
            let mut state = self.lock();
            // SYNC POINT: as above; both additions happen where the lock is held or after it was.
            while self.generation.load(Ordering::Acquire) == *seen && !state.stopping {
                state = self
                    .started
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if state.stopping {
                return None;
            }
            *seen = self.generation.load(Ordering::Acquire);
            if let Some(job) = state.job {
                // Relaxed: `finish` takes the lock after this before it reads the counter.
                self.running.fetch_add(1, Ordering::Relaxed);
                return Some(job);
            }
        }
    }

    fn serve(&self) {
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.take_chunks(job))) {
                self.lock().panic = Some(PanicPayload(payload));
            }
            // SYNC POINT: pairs with the loads in `finish`.
            if self.running.fetch_sub(1, Ordering::Release) == 1 {
                // The lock orders this wake-up after a caller that is about to wait.
                drop(self.lock());
                self.finished.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap()
    }

    #[test]
    fn every_chunk_runs_once_for_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = pool(threads);
            assert_eq!(pool.threads(), threads);
            for chunks in [0, 1, 2, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(chunks, &|chunk| {
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = pool(3);
        for culprit in 0..8 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, &|chunk| {
                    assert_ne!(chunk, culprit, "chunk {chunk} fails")
                });
            }));
            let payload = caught.expect_err("the panic must not vanish");
            let text = payload.downcast_ref::<String>().unwrap();
            assert!(text.contains(&format!("chunk {culprit} fails")), "{text}");
        }
        let done = AtomicUsize::new(0);
        pool.run(8, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn a_pool_that_never_worked_ends() {
        drop(pool(4));
    }

    #[test]
    fn parked_workers_wake_up() {
        let pool = pool(2);
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let done = AtomicUsize::new(0);
            pool.run(2, &|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 2);
        }
    }
}
