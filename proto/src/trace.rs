//! W3C trace context (Trace Context Level 1, section 3.2): one header that every call and every row carries.

use std::fmt;
use std::str::FromStr;

/// Name of the metadata key.
pub const TRACEPARENT: &str = "traceparent";

/// A parsed `traceparent` of version 00.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// Id of the whole trace, not 0.
    pub trace_id: u128,
    /// Id of the span that made the call, not 0.
    pub parent_id: u64,
    /// Bit 0: sampled.
    pub flags: u8,
}

/// A text that is no `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a traceparent of version 00")]
pub struct InvalidTraceparent;

impl FromStr for TraceContext {
    type Err = InvalidTraceparent;

    fn from_str(text: &str) -> Result<Self, InvalidTraceparent> {
        let mut parts = text.split('-');
        let mut next = |length: usize| {
            parts
                .next()
                .filter(|part| part.len() == length)
                .filter(|part| {
                    part.bytes()
                        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
                })
                .ok_or(InvalidTraceparent)
        };
        let (version, trace_id, parent_id, flags) = (next(2)?, next(32)?, next(16)?, next(2)?);
        if version != "00" || parts.next().is_some() {
            return Err(InvalidTraceparent);
        }
        let context = Self {
            trace_id: u128::from_str_radix(trace_id, 16).map_err(|_bad| InvalidTraceparent)?,
            parent_id: u64::from_str_radix(parent_id, 16).map_err(|_bad| InvalidTraceparent)?,
            flags: u8::from_str_radix(flags, 16).map_err(|_bad| InvalidTraceparent)?,
        };
        if context.trace_id == 0 || context.parent_id == 0 {
            return Err(InvalidTraceparent);
        }
        Ok(context)
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "00-{:032x}-{:016x}-{:02x}",
            self.trace_id, self.parent_id, self.flags
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn the_example_of_the_specification_survives_the_round_trip() {
        let context: TraceContext = EXAMPLE.parse().unwrap();
        assert_eq!(context.flags, 1);
        assert_eq!(context.to_string(), EXAMPLE);
    }

    #[test]
    fn malformed_headers_are_refused() {
        for text in [
            "",
            "00",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(
                text.parse::<TraceContext>(),
                Err(InvalidTraceparent),
                "{text}"
            );
        }
    }
}
