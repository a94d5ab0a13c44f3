//! `tojson` as Python's `json.dumps` writes it: models were trained on its spaces and its order of keys.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deepest nesting that is written.
const MAX_DEPTH: usize = 128;

/// Widest indent.
const MAX_INDENT: usize = 64;

/// Filter `tojson(indent=None, ensure_ascii=False, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        Some(indent) if !indent.is_none() => Some(indent_text(&indent)?),
        _ => None,
    };
    let default_item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match kwargs.get::<Option<Value>>("separators")? {
        Some(pair) if !pair.is_none() => separators(&pair)?,
        _ => (default_item.to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer {
        state,
        out: String::new(),
        charged: 0,
        indent,
        item,
        key,
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

struct Writer<'a, 'b> {
    state: &'a State<'b, 'b>,
    out: String,
    /// Bytes of `out` that were paid for.
    charged: usize,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Writer<'_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("value is nested deeper than {MAX_DEPTH}")));
        }
        self.pay()?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.sequence(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            other => return Err(invalid(format!("{other} is not JSON serializable"))),
        }
        Ok(())
    }

    fn sequence(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut empty = true;
        self.out.push('[');
        for element in value.try_iter()? {
            self.separate(empty, depth + 1);
            empty = false;
            self.value(&element, depth + 1)?;
        }
        self.close(empty, depth, ']');
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort {
            keys.sort();
        }
        let empty = keys.is_empty();
        self.out.push('{');
        for (at, key) in keys.iter().enumerate() {
            self.separate(at == 0, depth + 1);
            match key.kind() {
                ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                ValueKind::None => self.string("null"),
                ValueKind::Bool => self.string(if key.is_true() { "true" } else { "false" }),
                ValueKind::Number => self.string(&number(key)),
                other => return Err(invalid(format!("a key cannot be {other}"))),
            }
            self.out.push_str(&self.key);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.close(empty, depth, '}');
        Ok(())
    }

    fn separate(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.item);
        }
        self.line(depth);
    }

    fn close(&mut self, empty: bool, depth: usize, bracket: char) {
        if !empty {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                plain if plain >= ' ' && (plain.is_ascii() && plain != '\u{7f}' || !self.ascii) => {
                    self.out.push(plain);
                }
                '\u{7f}' => self.out.push('\u{7f}'),
                escaped => {
                    for unit in escaped.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
            }
        }
        self.out.push('"');
    }

    /// Charges fuel for what was written since the last time.
    fn pay(&mut self) -> Result<(), Error> {
        let grown = (self.out.len() - self.charged) / 64;
        self.charged += grown * 64;
        self.state
            .consume_fuel(u64::try_from(grown).unwrap_or(u64::MAX).saturating_add(1))
    }
}

/// A number as Python's `repr` has it.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) => float_text(float),
        Err(_) => value.to_string(),
    }
}

fn float_text(float: f64) -> String {
    if float.is_nan() {
        return "NaN".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    // Rust and Python both print the shortest digits that read back; only the layout differs.
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{float}");
        return if plain.contains('.') {
            plain
        } else {
            plain + ".0"
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

fn indent_text(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        if text.len() > MAX_INDENT {
            return Err(invalid(format!(
                "indent has {} bytes, limit is {MAX_INDENT}",
                text.len()
            )));
        }
        return Ok(text.to_owned());
    }
    let width = i64::try_from(indent.clone())?;
    match usize::try_from(width.max(0)) {
        Ok(width) if width <= MAX_INDENT => Ok(" ".repeat(width)),
        _ => Err(invalid(format!("indent is {width}, limit is {MAX_INDENT}"))),
    }
}

fn separators(pair: &Value) -> Result<(String, String), Error> {
    let parts: Vec<Value> = pair.try_iter()?.take(3).collect();
    match parts.as_slice() {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) if item.len() + key.len() <= MAX_INDENT => {
                Ok((item.to_owned(), key.to_owned()))
            }
            _ => Err(invalid("separators are two short strings".to_owned())),
        },
        _ => Err(invalid("separators are two short strings".to_owned())),
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {message}"))
}

#[cfg(test)]
mod tests {
    use super::float_text;

    #[test]
    fn floats_look_like_python() {
        for (float, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123_456_789.125, "123456789.125"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (2.5e300, "2.5e+300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(float_text(float), text);
        }
    }
}
