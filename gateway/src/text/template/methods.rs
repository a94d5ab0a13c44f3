//! Methods that templates call on Python's built-in types.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat;

/// Calls a method that the engine does not know.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, method, arguments);
    };
    match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, found, after) = match text.split_once(separator) {
                Some((before, after)) => (before, separator, after),
                None => (text, "", ""),
            };
            Ok([before, found, after]
                .into_iter()
                .map(Value::from)
                .collect())
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, found, after) = match text.rsplit_once(separator) {
                Some((before, after)) => (before, separator, after),
                None => ("", "", text),
            };
            Ok([before, found, after]
                .into_iter()
                .map(Value::from)
                .collect())
        }
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(arguments)?;
            Ok(rsplit(text, separator, limit))
        }
        "splitlines" if arguments.is_empty() => Ok(python_lines(text)),
        "join"
            if arguments
                .first()
                .is_some_and(|list| list.kind() == ValueKind::Undefined) =>
        {
            Ok(Value::from(""))
        }
        _ => pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// `str.rsplit`: splits from the end, at most `limit` times.
fn rsplit(text: &str, separator: Option<&str>, limit: Option<i64>) -> Value {
    let limit = limit
        .and_then(|limit| usize::try_from(limit).ok())
        .unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = match separator {
        Some(_) => text,
        None => text.trim(),
    };
    while parts.len() < limit {
        let split = match separator {
            Some(separator) => rest.rsplit_once(separator),
            None => rest.rsplit_once(char::is_whitespace),
        };
        let Some((before, after)) = split else {
            break;
        };
        parts.push(after);
        rest = match separator {
            Some(_) => before,
            None => before.trim_end(),
        };
    }
    if separator.is_some() || !rest.is_empty() {
        parts.push(rest);
    }
    parts.into_iter().rev().map(Value::from).collect()
}

/// `str.splitlines` also ends a line at a lone carriage return.
fn python_lines(text: &str) -> Value {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find([
        '\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}',
    ]) {
        let (line, tail) = rest.split_at(at);
        lines.push(Value::from(line));
        let mut end = tail.chars();
        end.next();
        rest = tail.strip_prefix("\r\n").unwrap_or(end.as_str());
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    Value::from(lines)
}
