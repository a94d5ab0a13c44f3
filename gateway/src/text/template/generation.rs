//! `{% generation %}`: transformers' mark around what the assistant said, without meaning for a prompt.
//!
//! minijinja does not know the tag, so it becomes `{% with %}`, which scopes variables the same way and leaves the
//! treatment of whitespace around the tags as it is.

use crate::text::TextError;
use crate::text::token_table::too_large;

/// Longest tag: the engine's work on one expression grows with the square of its length.
const MAX_TAG_BYTES: usize = 16 * 1024;

/// Replaces the tags; everything else, comments and raw blocks included, stays byte for byte.
pub(super) fn rewrite(source: &str) -> Result<String, TextError> {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (text, tail) = rest.split_at(at);
        out.push_str(text);
        let length = match tail.as_bytes().get(1) {
            Some(b'#') => tail.find("#}").map(|end| end + 2),
            Some(b'{') => tag_length(tail, "}}"),
            Some(b'%') => tag_length(tail, "%}"),
            _ => Some(1),
        };
        let Some(length) = length else {
            // An unfinished tag: the parser will say so, after reading it to the end.
            too_large("bytes of one chat template tag", tail.len(), MAX_TAG_BYTES)?;
            rest = tail;
            break;
        };
        let (tag, tail) = tail.split_at(length);
        rest = tail;
        if !tag.starts_with("{#") {
            too_large("bytes of one chat template tag", tag.len(), MAX_TAG_BYTES)?;
        }
        match word(tag) {
            Some("generation") => out.push_str(&tag.replacen("generation", "with", 1)),
            Some("endgeneration") => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            Some("raw") => {
                out.push_str(tag);
                let end = end_of_raw(rest);
                let (raw, tail) = rest.split_at(end);
                out.push_str(raw);
                rest = tail;
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// The only word of a block tag, if it has just one.
fn word(tag: &str) -> Option<&str> {
    let inside = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    Some(inside.strip_suffix(['-', '+']).unwrap_or(inside).trim())
}

/// Length of a tag up to its end mark, which does not count inside a string.
fn tag_length(tag: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (at, byte) in tag.bytes().enumerate().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if byte == b'"' || byte == b'\'' => quote = Some(byte),
            None if tag.as_bytes()[at..].starts_with(end.as_bytes()) => {
                return Some(at + end.len());
            }
            None => {}
        }
    }
    None
}

/// Where the tag that ends a raw block begins.
fn end_of_raw(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%") {
        let at = from + at;
        let inside = text[at + 2..].trim_start_matches(['-', '+']).trim_start();
        if inside.starts_with("endraw") {
            return at;
        }
        from = at + 2;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{MAX_TAG_BYTES, rewrite};

    #[test]
    fn only_the_tags_change() {
        assert_eq!(
            rewrite("a{%- generation -%}b{% endgeneration %}c").unwrap(),
            "a{%- with -%}b{% endwith %}c"
        );
        for same in [
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{{ '{% generation %}' }}",
            "{% set x = \"\\\"%} {% generation %}\" %}",
            "{% if generation %}{% endif %}",
            "{% generation",
            "{",
            "{ é {",
        ] {
            assert_eq!(rewrite(same).unwrap(), same);
        }
    }

    #[test]
    fn an_endless_expression_is_refused() {
        let chain = "1~".repeat(MAX_TAG_BYTES / 2);
        assert!(rewrite(&format!("{{{{ {chain}1 }}}}")).is_err());
        assert!(rewrite(&format!("{{{{ {chain}")).is_err());
    }

    proptest! {
        #[test]
        fn any_source_is_survived(source in "[{}%#\"'\\\\ é-]{0,20}(raw|generation)?[{}%#]{0,6}") {
            let _ = rewrite(&source);
        }
    }
}
