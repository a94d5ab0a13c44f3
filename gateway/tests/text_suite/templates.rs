//! Templates give the text that Python gives, byte for byte, and their failures are errors.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use velox_gateway::text::{ChatTemplates, Clock, Message, TextError};
use velox_proto::error::{Reason, ServiceError as _, to_status};
use velox_proto::worker::v1::{ChatTemplate, TokenizerDescription};

use crate::support::{byte_level, tokenizer};

/// 2026-11-30 08:05:09, the moment that the fixtures were rendered at.
const NOW_SECONDS: u64 = 1_796_025_909;

fn templates(named: &[(&str, &str)]) -> Result<ChatTemplates, TextError> {
    let description = TokenizerDescription {
        bos_token_id: Some(256),
        eos_token_id: Some(257),
        chat_templates: named
            .iter()
            .map(|&(name, source)| ChatTemplate {
                name: name.to_owned(),
                source: source.to_owned(),
            })
            .collect(),
        ..byte_level("gpt-2", &[("<s>", 3), ("</s>", 3)], &[])
    };
    let clock = Clock::Fixed(UNIX_EPOCH + Duration::from_secs(NOW_SECONDS));
    let templates = ChatTemplates::from_description(&description, &tokenizer(&description))?;
    Ok(templates.with_clock(clock))
}

fn turn(role: &str, content: &str) -> Message {
    Message {
        role: role.to_owned(),
        content: content.to_owned(),
    }
}

fn render(source: &str) -> Result<String, TextError> {
    templates(&[("default", source)])
        .unwrap()
        .render(&[turn("user", "hi")], &Map::new())
}

#[test]
fn text_equals_that_of_python_jinja2() {
    let cases: Vec<Value> =
        serde_json::from_str(include_str!("../fixtures/templates.json")).unwrap();
    assert!(cases.len() > 60);
    let mut wrong = Vec::new();
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let templates = templates(&[("default", case["template"].as_str().unwrap())]).unwrap();
        let messages = case["messages"].as_array().unwrap();
        let found = templates.render_json(messages, case["arguments"].as_object().unwrap());
        let right = match (&found, &case["expected"], &case["refused"], &case["fails"]) {
            (Ok(text), Value::String(expected), _, _) => text == expected,
            (Err(TextError::TemplateRefused(text)), _, Value::String(refused), _) => {
                text == refused
            }
            (Err(TextError::TemplateFailed(_)), _, _, Value::String(_)) => true,
            _ => false,
        };
        if !right {
            wrong.push(format!("{name}\nfound {found:?}\npython {case}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} differ\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n\n")
    );
}

#[test]
fn the_template_for_tools_is_taken_when_there_are_tools() {
    let both = templates(&[("default", "plain"), ("tool_use", "tools")]).unwrap();
    let user = [turn("user", "hi")];
    let arguments = |value: Value| value.as_object().unwrap().clone();
    assert_eq!(both.render(&user, &Map::new()).unwrap(), "plain");
    assert_eq!(
        both.render(&user, &arguments(json!({"tools": []})))
            .unwrap(),
        "plain"
    );
    assert_eq!(
        both.render(&user, &arguments(json!({"tools": null})))
            .unwrap(),
        "plain"
    );
    assert_eq!(
        both.render(&user, &arguments(json!({"tools": [{}]})))
            .unwrap(),
        "tools"
    );
    let one = templates(&[("", "unnamed"), ("default", "later")]).unwrap();
    assert_eq!(
        one.render(&user, &arguments(json!({"tools": [{}]})))
            .unwrap(),
        "unnamed"
    );
    let other = templates(&[("rag", "first")]).unwrap();
    assert_eq!(other.render(&user, &Map::new()).unwrap(), "first");
}

#[test]
fn messages_with_role_and_content_are_rendered_in_order() {
    let source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}{{ add_generation_prompt }}{{ eos_token }}";
    let found = templates(&[("default", source)])
        .unwrap()
        .render(&[turn("system", "s"), turn("user", "<é>")], &Map::new());
    assert_eq!(found.unwrap(), "<s>system:s;user:<é>;True</s>");
}

#[test]
fn a_model_without_a_template_does_not_get_an_invented_one() {
    let none = templates(&[]).unwrap();
    assert!(none.is_empty());
    let error = none.render(&[turn("user", "hi")], &Map::new()).unwrap_err();
    assert!(matches!(error, TextError::NoChatTemplate));
    assert_eq!(error.reason(), Reason::TemplateFailed);
}

#[test]
fn what_the_template_says_reaches_the_caller_and_the_next_call_is_unharmed() {
    let source = "{% if messages[0].role == 'user' %}{{ raise_exception('system first, please') }}{% endif %}fine";
    let templates = templates(&[("default", source)]).unwrap();
    let error = templates
        .render(&[turn("user", "hi")], &Map::new())
        .unwrap_err();
    assert!(matches!(&error, TextError::TemplateRefused(text) if text == "system first, please"));
    let status = to_status(&error);
    assert_eq!(status.code(), Reason::TemplateFailed.code());
    assert!(status.message().contains("system first, please"));
    assert_eq!(error.field(), Some("messages"));
    assert_eq!(
        templates
            .render(&[turn("system", "s")], &Map::new())
            .unwrap(),
        "fine"
    );
}

#[test]
fn a_broken_template_is_an_error_of_the_model_when_it_is_used() {
    let templates = templates(&[("default", "{% if %}"), ("tool_use", "ok")]).unwrap();
    let error = templates
        .render(&[turn("user", "hi")], &Map::new())
        .unwrap_err();
    assert!(matches!(&error, TextError::InvalidTemplate { name, .. } if name == "default"));
    assert_eq!(error.reason(), Reason::InvalidModel);
    let tools = json!({"tools": [{}]});
    assert!(
        templates
            .render(&[turn("user", "hi")], tools.as_object().unwrap())
            .is_ok()
    );
}

#[test]
fn a_template_without_end_runs_out_of_fuel() {
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% include 'default' %}",
        "{{ ([1] * 10000000)|tojson(indent=64) }}",
        "{{ 'aaaaaaaa'.replace('', 'b' * 1000000).replace('', 'c' * 1000000) }}",
    ] {
        let error = render(source).unwrap_err();
        assert!(
            matches!(error, TextError::TemplateFailed(_)),
            "{source}: {error}"
        );
    }
}

#[test]
fn deep_values_and_long_expressions_do_not_exhaust_the_stack() {
    let lists = format!("{}ns.x{}", "[".repeat(40), "]".repeat(40));
    let build = |times: usize| {
        let body = format!("{{% set ns.x = {lists} %}}");
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range({times}) %}}{body}{{% endfor %}}"
        )
    };
    // The second fails for want of fuel with a value of the greatest depth at hand.
    for end in ["ok", "{% for i in range(1000000) %}{{ i }}{% endfor %}"] {
        assert_eq!(render(&(build(3500) + end)).is_ok(), end == "ok");
    }
    for end in [
        "{{ ns.x }}",
        "{{ ns.x|tojson }}",
        "{{ [ns.x]|unique|list|length }}",
        "{{ {ns.x: 1} }}",
        "{{ ns.x|pprint }}{{ debug() }}",
    ] {
        let _ = render(&(build(3500) + end));
    }
    let two = build(2200) + "{% set a = ns.x %}" + &build(2200);
    assert_eq!(render(&(two.clone() + "{{ ns.x == a }}")).unwrap(), "True");
    assert_eq!(render(&(two + "{{ [ns.x, a]|sort|length }}")).unwrap(), "2");

    let chain = format!("{{{{ {}1 }}}}", "1+".repeat(4000));
    assert_eq!(render(&chain).unwrap(), "4001");
    let endless = templates(&[("default", &format!("{{{{ {}1 }}}}", "1+".repeat(10_000)))]);
    assert!(matches!(endless, Err(TextError::TokenizerTooLarge { .. })));
}

#[test]
fn templates_are_limited_in_number_and_length() {
    let long = "x".repeat(200_000);
    assert!(matches!(
        templates(&[("default", &long)]),
        Err(TextError::TokenizerTooLarge { .. })
    ));
    let names: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "x")).collect();
    assert!(templates(&many).is_err());
}
