//! The bytes that each token stands for.

use super::{MAX_VOCABULARY_TOKENS, TextError};

/// How a vocabulary spells bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Every byte is one printable character, as GPT-2 has it: a space is `Ġ`.
    ByteLevel,
    /// A space is U+2581, a lone byte is `<0xNN>`.
    SentencePiece,
}

/// One token as a vocabulary has it.
#[derive(Debug, Clone)]
pub(super) struct Entry<'a> {
    pub(super) id: u32,
    pub(super) text: &'a str,
    pub(super) kind: Kind,
}

/// What a token is to the reader of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Spelled as the vocabulary spells.
    Ordinary,
    /// Stands for its own characters.
    Verbatim,
    /// Control markup: stands for its own characters, and is hidden from the user.
    Special,
}

/// Token id -> bytes, in one allocation.
#[derive(Debug)]
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    /// `ends[id]` is where the bytes of the token end; they begin where those of its predecessor end.
    ends: Vec<usize>,
    special: Vec<bool>,
}

/// Longest text of all tokens together.
const MAX_TABLE_BYTES: usize = 64 * 1024 * 1024;

impl Spelling {
    /// Looks at the vocabulary as a whole: the `decoder` of a tokenizer.json is at times that of another model.
    pub(super) fn of<'a>(tokens: impl Iterator<Item = &'a str>) -> Option<Self> {
        let (mut alphabet, mut lone_bytes, mut marked) = (0, 0, 0_usize);
        let (mut space, mut newline) = (false, false);
        for token in tokens {
            let mut characters = token.chars();
            if let (Some(only), None) = (characters.next(), characters.next()) {
                alphabet += usize::from(byte_of(only).is_some());
                space |= only == 'Ġ';
                newline |= only == 'Ċ';
            }
            lone_bytes += usize::from(lone_byte(token).is_some());
            marked += usize::from(token.starts_with('\u{2581}'));
        }
        // Large SentencePiece vocabularies have most of the byte alphabet as letters, so lone bytes decide first;
        // some byte-level ones lack bytes that never occur in UTF-8 or in their training text.
        if lone_bytes == 256 {
            Some(Self::SentencePiece)
        } else if alphabet >= 200 && space && newline {
            Some(Self::ByteLevel)
        } else if marked > 0 || lone_bytes > 0 {
            Some(Self::SentencePiece)
        } else {
            None
        }
    }

    fn write(self, text: &str, into: &mut Vec<u8>) {
        match self {
            Self::ByteLevel => {
                let from = into.len();
                for character in text.chars() {
                    if let Some(byte) = byte_of(character) {
                        into.push(byte);
                    } else {
                        // Not of the alphabet at all: an added token in disguise.
                        into.truncate(from);
                        into.extend_from_slice(text.as_bytes());
                        return;
                    }
                }
            }
            Self::SentencePiece => match lone_byte(text) {
                Some(byte) => into.push(byte),
                None => {
                    for (at, part) in text.split('\u{2581}').enumerate() {
                        if at > 0 {
                            into.push(b' ');
                        }
                        into.extend_from_slice(part.as_bytes());
                    }
                }
            },
        }
    }
}

impl TokenTable {
    /// Lays out the table; of two entries with one id the later wins.
    pub(super) fn new(mut entries: Vec<Entry<'_>>, spelling: Spelling) -> Result<Self, TextError> {
        entries.sort_by_key(|entry| entry.id);
        let length = match entries.last() {
            Some(last) => usize::try_from(last.id)
                .unwrap_or(usize::MAX)
                .saturating_add(1),
            None => return Err(TextError::NoTokenizer),
        };
        too_large("token ids", length, MAX_VOCABULARY_TOKENS)?;
        let total: usize = entries.iter().map(|entry| entry.text.len()).sum();
        too_large("bytes of token text", total, MAX_TABLE_BYTES)?;

        let mut table = Self {
            bytes: Vec::with_capacity(total),
            ends: Vec::with_capacity(length),
            special: Vec::with_capacity(length),
        };
        for entry in entries {
            let id = usize::try_from(entry.id).unwrap_or(usize::MAX);
            if table.ends.len() > id {
                table.ends.pop();
                table.special.pop();
                table
                    .bytes
                    .truncate(table.ends.last().copied().unwrap_or(0));
            }
            while table.ends.len() < id {
                table.ends.push(table.bytes.len());
                table.special.push(false);
            }
            match entry.kind {
                Kind::Ordinary => spelling.write(entry.text, &mut table.bytes),
                Kind::Verbatim | Kind::Special => {
                    table.bytes.extend_from_slice(entry.text.as_bytes());
                }
            }
            table.ends.push(table.bytes.len());
            table.special.push(entry.kind == Kind::Special);
        }
        Ok(table)
    }

    /// Returns the bytes of a token; `None` for an id without text.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let id = usize::try_from(id).ok()?;
        let end = *self.ends.get(id)?;
        let begin = match id.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        self.bytes.get(begin..end).filter(|bytes| !bytes.is_empty())
    }

    /// Tells whether a token is control markup.
    pub(super) fn is_special(&self, id: u32) -> bool {
        usize::try_from(id).is_ok_and(|id| self.special.get(id).copied().unwrap_or(false))
    }

    /// Returns one more than the largest id.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.ends.len()).unwrap_or(u32::MAX)
    }
}

/// Refuses a count above its limit.
pub(super) fn too_large(what: &'static str, actual: usize, limit: usize) -> Result<(), TextError> {
    if actual > limit {
        return Err(TextError::TokenizerTooLarge {
            what,
            actual,
            limit,
        });
    }
    Ok(())
}

/// Byte of a character of GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes follow from
/// U+0100 on in their own order.
pub(super) fn byte_of(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

fn lone_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: u32, text: &str, kind: Kind) -> Entry<'_> {
        Entry { id, text, kind }
    }

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = ('\0'..'\u{200}').filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn tokens_stand_for_their_bytes() {
        let table = TokenTable::new(
            vec![
                entry(0, "<s>", Kind::Special),
                entry(3, "Ġhi", Kind::Ordinary),
                entry(4, "Ġ", Kind::Verbatim),
                entry(5, "日", Kind::Ordinary),
            ],
            Spelling::ByteLevel,
        )
        .unwrap();
        assert_eq!(table.bytes(0), Some(&b"<s>"[..]));
        assert_eq!(table.bytes(1), None);
        assert_eq!(table.bytes(3), Some(&b" hi"[..]));
        assert_eq!(table.bytes(4), Some("Ġ".as_bytes()));
        assert_eq!(table.bytes(5), Some("日".as_bytes()));
        assert_eq!(table.bytes(6), None);
        assert_eq!(table.bytes(u32::MAX), None);
        assert!(table.is_special(0) && !table.is_special(3) && !table.is_special(9));
        assert_eq!(table.len(), 6);
    }

    #[test]
    fn a_later_entry_replaces_an_earlier_one() {
        let table = TokenTable::new(
            vec![
                entry(1, "Ġa", Kind::Ordinary),
                entry(1, "<x>", Kind::Special),
                entry(2, "Ġb", Kind::Ordinary),
            ],
            Spelling::ByteLevel,
        )
        .unwrap();
        assert_eq!(table.bytes(1), Some(&b"<x>"[..]));
        assert_eq!(table.bytes(2), Some(&b" b"[..]));
    }

    #[test]
    fn lone_bytes_and_spaces_of_sentence_piece() {
        let table = TokenTable::new(
            vec![
                entry(0, "<0xE2>", Kind::Ordinary),
                entry(1, "\u{2581}a\u{2581}", Kind::Ordinary),
                entry(2, "<0x+1>", Kind::Ordinary),
            ],
            Spelling::SentencePiece,
        )
        .unwrap();
        assert_eq!(table.bytes(0), Some(&[0xE2][..]));
        assert_eq!(table.bytes(1), Some(&b" a "[..]));
        assert_eq!(table.bytes(2), Some(&b"<0x+1>"[..]));
    }

    #[test]
    fn an_id_beyond_the_limit_is_refused_before_memory_is_taken() {
        let error = TokenTable::new(
            vec![entry(u32::MAX, "a", Kind::Ordinary)],
            Spelling::ByteLevel,
        );
        assert!(matches!(error, Err(TextError::TokenizerTooLarge { .. })));
    }
}
