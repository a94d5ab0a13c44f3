//! Whether a tensor thread that has something to do shows signs of life. Pure: time is an argument.

use std::time::{Duration, Instant};

use super::config::PoolTimeouts;

/// Shares of the stall limit after which the signs are looked at.
const CHECKS_PER_LIMIT: u32 = 8;

/// Shortest and longest time between two looks.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(10);
const MAX_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// What the supervisor should do about the process now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It lives, or nothing can be said yet.
    Alive,
    /// It has nothing to do and was silent for long: ask it.
    Ask,
    /// It has something to do and was silent for too long.
    Wedged { silence: Duration, limit: Duration },
}

/// Signs of life of one tensor thread.
#[derive(Debug)]
pub(super) struct Liveness {
    stall: Duration,
    stall_per_token: Duration,
    stall_busy: Duration,
    ping: Duration,
    /// Last sign since a call has occupied the thread; `None` while none does.
    busy_sign: Option<Instant>,
    last_sign: Instant,
    heartbeat: u64,
}

impl Liveness {
    pub(super) fn new(timeouts: &PoolTimeouts, heartbeat: u64, now: Instant) -> Self {
        Self {
            stall: timeouts.stall,
            stall_per_token: timeouts.stall_per_token,
            stall_busy: timeouts.stall_busy,
            ping: timeouts.ping,
            busy_sign: None,
            last_sign: now,
            heartbeat,
        }
    }

    /// Returns how often to look.
    pub(super) fn check_interval(&self) -> Duration {
        let shortest = self.stall.min(self.ping);
        (shortest / CHECKS_PER_LIMIT).clamp(MIN_CHECK_INTERVAL, MAX_CHECK_INTERVAL)
    }

    /// Takes note of anything that only a living tensor thread does, or of the first thing it is asked to do.
    pub(super) fn sign(&mut self, now: Instant) {
        self.last_sign = now;
        if let Some(busy) = &mut self.busy_sign {
            *busy = now;
        }
    }

    /// Judges while a call occupies the thread, which shows less of itself then than in a pass. Once the call is
    /// over, silence counts from there.
    pub(super) fn judge_busy(&mut self, heartbeat: u64, now: Instant) -> Verdict {
        if heartbeat != self.heartbeat {
            self.heartbeat = heartbeat;
            self.busy_sign = Some(now);
        }
        self.last_sign = now;
        let last = *self.busy_sign.get_or_insert(now);
        let (silence, limit) = (now.saturating_duration_since(last), self.stall_busy);
        if silence > limit {
            Verdict::Wedged { silence, limit }
        } else {
            Verdict::Alive
        }
    }

    /// Judges by the counter and the clock. `awaited_tokens` is the size of the pass at hand, 0 for a ping or
    /// an offer, `None` if nothing is awaited. A counter that changed at all is a sign: a wild value too.
    pub(super) fn judge(
        &mut self,
        heartbeat: u64,
        awaited_tokens: Option<u32>,
        now: Instant,
    ) -> Verdict {
        self.busy_sign = None;
        if heartbeat != self.heartbeat {
            self.heartbeat = heartbeat;
            self.last_sign = now;
        }
        let silence = now.saturating_duration_since(self.last_sign);
        let Some(tokens) = awaited_tokens else {
            return if silence >= self.ping {
                Verdict::Ask
            } else {
                Verdict::Alive
            };
        };
        let limit = self.stall + self.stall_per_token.saturating_mul(tokens);
        if silence > limit {
            Verdict::Wedged { silence, limit }
        } else {
            Verdict::Alive
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn liveness(start: Instant) -> Liveness {
        let timeouts = PoolTimeouts {
            stall: 10 * SECOND,
            stall_per_token: SECOND,
            stall_busy: 60 * SECOND,
            ping: 3 * SECOND,
            ..PoolTimeouts::default()
        };
        Liveness::new(&timeouts, 7, start)
    }

    #[test]
    fn the_limit_grows_with_the_plan() {
        let start = Instant::now();
        let mut liveness = liveness(start);
        assert_eq!(
            liveness.judge(7, Some(5), start + 15 * SECOND),
            Verdict::Alive
        );
        assert_eq!(
            liveness.judge(7, Some(5), start + 16 * SECOND),
            Verdict::Wedged {
                silence: 16 * SECOND,
                limit: 15 * SECOND
            }
        );
    }

    #[test]
    fn a_moving_counter_keeps_the_slowest_worker_alive() {
        let start = Instant::now();
        let mut liveness = liveness(start);
        for step in 1..100_u32 {
            let now = start + 9 * SECOND * step;
            let verdict = liveness.judge(7 + u64::from(step), Some(0), now);
            assert_eq!(verdict, Verdict::Alive);
        }
    }

    #[test]
    fn a_busy_worker_has_longer_and_its_silence_is_forgotten_afterwards() {
        let start = Instant::now();
        let mut liveness = liveness(start);
        let at = |seconds: u32| start + SECOND * seconds;
        assert_eq!(liveness.judge_busy(7, at(1)), Verdict::Alive);
        assert_eq!(liveness.judge_busy(7, at(60)), Verdict::Alive);
        // A load that shows progress may take any time.
        assert_eq!(liveness.judge_busy(8, at(61)), Verdict::Alive);
        assert_eq!(liveness.judge_busy(8, at(121)), Verdict::Alive);
        assert_eq!(liveness.judge(8, Some(0), at(130)), Verdict::Alive);
        // The next call starts afresh.
        assert_eq!(liveness.judge_busy(8, at(140)), Verdict::Alive);
        assert_eq!(
            liveness.judge_busy(8, at(201)),
            Verdict::Wedged {
                silence: 61 * SECOND,
                limit: 60 * SECOND
            }
        );
    }

    #[test]
    fn an_idle_worker_is_asked_and_an_asked_one_must_answer() {
        let start = Instant::now();
        let mut liveness = liveness(start);
        assert_eq!(liveness.judge(7, None, start + 2 * SECOND), Verdict::Alive);
        assert_eq!(liveness.judge(7, None, start + 3 * SECOND), Verdict::Ask);
        liveness.sign(start + 3 * SECOND);
        assert_eq!(
            liveness.judge(7, Some(0), start + 13 * SECOND),
            Verdict::Alive
        );
        assert!(matches!(
            liveness.judge(7, Some(0), start + 14 * SECOND),
            Verdict::Wedged { .. }
        ));
    }
}
