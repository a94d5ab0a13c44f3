//! Why an op refuses its operands.

/// A refusal of operands that do not fit each other; nothing was computed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// An operand has another length than the others need.
    #[error("{what} has {actual} elements, its shape needs {expected}")]
    Length {
        /// Operand at fault.
        what: &'static str,
        /// Elements that the shape needs.
        expected: usize,
        /// Elements given.
        actual: usize,
    },
    /// An operand is no whole number of rows.
    #[error("{what} has {actual} elements, no whole number of rows of {row}")]
    PartialRow {
        /// Operand at fault.
        what: &'static str,
        /// Elements of one row.
        row: usize,
        /// Elements given.
        actual: usize,
    },
    /// A number is above its limit.
    #[error("{what} is {value}, limit is {limit}")]
    AboveLimit {
        /// What the number counts.
        what: &'static str,
        /// The largest allowed.
        limit: usize,
        /// The number given.
        value: usize,
    },
    /// Query heads do not share key/value heads evenly.
    #[error("{n_heads} query heads cannot share {n_kv_heads} kv heads evenly")]
    UngroupedHeads {
        /// `H`.
        n_heads: usize,
        /// `G`.
        n_kv_heads: usize,
    },
    /// A size that must be at least 1 is 0.
    #[error("{what} is 0, must be at least 1")]
    Zero {
        /// What the size counts.
        what: &'static str,
    },
    /// A product of sizes overflows.
    #[error("size of {what} overflows")]
    Overflow {
        /// Operand at fault.
        what: &'static str,
    },
    /// A block type that matrices are read in, but not made.
    #[error("block type {block} has no quantiser")]
    NoQuantiser {
        /// Block type.
        block: &'static str,
    },
    /// A value to quantise is no number, or its block needs a scale that f16 has not.
    #[error("a value is no number, or too large for a block with an f16 scale")]
    BeyondBlock,
}

/// Checks the length of an operand.
pub(crate) fn check_length(
    what: &'static str,
    expected: usize,
    actual: usize,
) -> Result<(), OpError> {
    if actual == expected {
        Ok(())
    } else {
        Err(OpError::Length {
            what,
            expected,
            actual,
        })
    }
}

/// Multiplies sizes.
pub(crate) fn product(what: &'static str, sizes: &[usize]) -> Result<usize, OpError> {
    sizes
        .iter()
        .try_fold(1_usize, |total, &size| total.checked_mul(size))
        .ok_or(OpError::Overflow { what })
}

/// Returns how many rows of `row` elements an operand of `length` elements has; 0 if both are 0.
pub(crate) fn row_count(what: &'static str, length: usize, row: usize) -> Result<usize, OpError> {
    match (length, row) {
        (0, _) => Ok(0),
        (_, row) if row > 0 && length.is_multiple_of(row) => Ok(length / row),
        _ => Err(OpError::PartialRow {
            what,
            row,
            actual: length,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_only_if_whole() {
        assert_eq!(row_count("input", 0, 0), Ok(0));
        assert_eq!(row_count("input", 0, 7), Ok(0));
        assert_eq!(row_count("input", 21, 7), Ok(3));
        let partial = OpError::PartialRow {
            what: "input",
            row: 7,
            actual: 22,
        };
        assert_eq!(row_count("input", 22, 7), Err(partial));
        assert_eq!(
            partial.to_string(),
            "input has 22 elements, no whole number of rows of 7"
        );
        assert!(row_count("input", 1, 0).is_err());
    }

    #[test]
    fn products_do_not_wrap() {
        assert_eq!(product("page", &[3, 5, 7]), Ok(105));
        assert_eq!(
            product("page", &[usize::MAX, 2]),
            Err(OpError::Overflow { what: "page" })
        );
    }
}
