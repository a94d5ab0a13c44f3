//! Standard output is data, standard error is people.

use std::io::{self, IsTerminal as _, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

/// Form of the data on standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// Writes data and notes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) format: Format,
}

impl Output {
    /// Writes one JSON object as a line.
    pub(crate) fn json(self, value: &Value) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{value}")?;
        stdout.flush()
    }

    /// Writes text at once, without a line end.
    pub(crate) fn text(self, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }

    /// Writes a line for people.
    pub(crate) fn note(self, text: &str) {
        // A closed standard error must not end a command that has data to write.
        let _ = writeln!(io::stderr().lock(), "{text}");
    }

    /// Makes a bar over bytes; invisible when standard error is no terminal.
    pub(crate) fn progress(self, total_bytes: u64) -> ProgressBar {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total_bytes), target);
        if let Ok(style) = ProgressStyle::with_template(
            "{msg:12} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar
    }

    /// Makes a bar over a count of steps.
    pub(crate) fn steps(self, total: u64, what: &'static str) -> ProgressBar {
        let bar = self.progress(total);
        if let Ok(style) = ProgressStyle::with_template("{msg:12} [{bar:30}] {pos}/{len} {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.with_message(what)
    }

    /// Shows that something is going on whose length is unknown.
    pub(crate) fn spinner(self, what: String) -> ProgressBar {
        let bar = self.progress(0);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(std::time::Duration::from_millis(100));
        bar.with_message(what)
    }
}

/// Lays rows out in columns; the last column is not padded.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    for row in std::iter::once(&header).chain(rows) {
        let last = row.len().saturating_sub(1);
        for (index, (cell, width)) in row.iter().zip(&widths).enumerate() {
            text.push_str(cell);
            if index < last {
                let padding = width - cell.chars().count() + 2;
                text.extend(std::iter::repeat_n(' ', padding));
            }
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [
            vec!["größer".to_owned(), "1".to_owned()],
            vec!["b".to_owned(), "2".to_owned()],
        ];
        assert_eq!(
            table(&["a", "n"], &rows),
            "a       n\ngrößer  1\nb       2\n"
        );
    }
}
