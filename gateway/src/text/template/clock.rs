//! `strftime_now`: the date that some templates put into the system turn.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

/// Where templates get the time from; they see UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// The clock of the machine.
    System,
    /// Always the same moment: renderings can be compared.
    Fixed(SystemTime),
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Longest format that is written.
const MAX_FORMAT_BYTES: usize = 1024;

impl Clock {
    /// Formats the time as C's `strftime` does in the "C" locale.
    pub(super) fn format(self, format: &str) -> Result<String, Error> {
        if format.len() > MAX_FORMAT_BYTES {
            return Err(invalid(format!(
                "format has {} bytes, limit is {MAX_FORMAT_BYTES}",
                format.len()
            )));
        }
        let now = match self {
            Self::System => SystemTime::now(),
            Self::Fixed(moment) => moment,
        };
        let seconds = now
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let moment = Moment::new(seconds);
        let mut out = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let (pad, code) = match characters.next() {
                Some('-') => (Pad::None, characters.next()),
                code => (Pad::Zero, code),
            };
            moment.write(code, pad, &mut out)?;
        }
        Ok(out)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pad {
    Zero,
    None,
}

/// A moment taken apart.
struct Moment {
    year: u64,
    month: u64,
    day: u64,
    /// From 1.
    day_of_year: u64,
    /// Days since Sunday.
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Moment {
    fn new(seconds: u64) -> Self {
        let days = seconds / 86_400;
        let time = seconds % 86_400;
        // Civil date from days, on years that begin in March (H. Hinnant): leap days fall at their end.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_march_year =
            day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_march_year + 2) / 153;
        let day = day_of_march_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 {
            month_from_march + 3
        } else {
            month_from_march - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let leap =
            year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let day_of_year = if month <= 2 {
            day_of_march_year - 305
        } else {
            day_of_march_year + 60 + u64::from(leap)
        };
        Self {
            year,
            month,
            day,
            day_of_year,
            weekday: (days + 4) % 7,
            hour: time / 3600,
            minute: time / 60 % 60,
            second: time % 60,
        }
    }

    fn write(&self, code: Option<char>, pad: Pad, out: &mut String) -> Result<(), Error> {
        let name = |names: &[&'static str], at: u64| {
            usize::try_from(at)
                .ok()
                .and_then(|at| names.get(at).copied())
                .unwrap_or_default()
        };
        let short = |name: &'static str| &name[..3];
        let hour = (self.hour + 11) % 12 + 1;
        let (number, width) = match code {
            Some('Y') => (self.year, 0),
            Some('y') => (self.year % 100, 2),
            Some('m') => (self.month, 2),
            Some('d') => (self.day, 2),
            Some('j') => (self.day_of_year, 3),
            Some('H') => (self.hour, 2),
            Some('I') => (hour, 2),
            Some('M') => (self.minute, 2),
            Some('S') => (self.second, 2),
            Some('u') => ((self.weekday + 6) % 7 + 1, 0),
            Some('w') => (self.weekday, 0),
            Some('B') => return text(out, name(&MONTHS, self.month - 1)),
            Some('b' | 'h') => return text(out, short(name(&MONTHS, self.month - 1))),
            Some('A') => return text(out, name(&DAYS, self.weekday)),
            Some('a') => return text(out, short(name(&DAYS, self.weekday))),
            Some('p') => return text(out, if self.hour < 12 { "AM" } else { "PM" }),
            Some('Z') => return text(out, "UTC"),
            Some('z') => return text(out, "+0000"),
            Some('%') => return text(out, "%"),
            Some('n') => return text(out, "\n"),
            Some('t') => return text(out, "\t"),
            Some('e') => {
                // Writing to a string cannot fail, here and below.
                let _ = write!(out, "{:2}", self.day);
                return Ok(());
            }
            Some('F') => {
                let _ = write!(out, "{}-{:02}-{:02}", self.year, self.month, self.day);
                return Ok(());
            }
            Some('T') => {
                let _ = write!(
                    out,
                    "{:02}:{:02}:{:02}",
                    self.hour, self.minute, self.second
                );
                return Ok(());
            }
            Some(other) => return Err(invalid(format!("code %{other} is not supported"))),
            None => return Err(invalid("format ends in %".to_owned())),
        };
        let width = if pad == Pad::None { 0 } else { width };
        let _ = write!(out, "{number:0width$}");
        Ok(())
    }
}

fn text(out: &mut String, text: &str) -> Result<(), Error> {
    out.push_str(text);
    Ok(())
}

fn invalid(message: String) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("strftime_now: {message}"),
    )
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::Clock;

    fn at(seconds: u64, format: &str) -> String {
        Clock::Fixed(UNIX_EPOCH + Duration::from_secs(seconds))
            .format(format)
            .unwrap()
    }

    #[test]
    fn dates_and_times_are_those_of_the_calendar() {
        assert_eq!(
            at(0, "%Y-%m-%d %H:%M:%S %a %j"),
            "1970-01-01 00:00:00 Thu 001"
        );
        assert_eq!(at(951_782_400, "%d %b %Y %j"), "29 Feb 2000 060");
        assert_eq!(
            at(1_735_603_200, "%A, %-d %B %y, %I %p, %j"),
            "Tuesday, 31 December 24, 12 AM, 366"
        );
        assert_eq!(at(4_107_542_400, "%F %e%%"), "2100-03-01  1%");
    }

    #[test]
    fn an_unknown_code_is_an_error() {
        assert!(Clock::System.format("%Q").is_err());
        assert!(Clock::System.format("%").is_err());
    }
}
