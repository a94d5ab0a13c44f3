#!/usr/bin/env python3
"""Writes fixtures/templates.json: chat templates and what Python's jinja2 3.1.6 makes of them.

The environment is set up as Hugging Face transformers sets it up. The templates were written for this test from the
constructs that published ones use. Run it from the folder that it lies in: make_template_fixture.py
"""

import datetime
import json

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = datetime.datetime(2026, 11, 30, 8, 5, 9)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Refused(Exception):
    pass


def raise_exception(message):
    raise Refused(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
)
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda form: NOW.strftime(form)

U = lambda text: {"role": "user", "content": text}
A = lambda text: {"role": "assistant", "content": text}
S = lambda text: {"role": "system", "content": text}
TALK = [S("Be brief."), U("Hi, who are you?"), A("  A model.\n"), U("Grüße 👋 & <b>bold</b> \"quoted\"")]
SHORT = [U("Hello")]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"zip": "00123", "city": "Zürich", "days": [1, 2.0, 1e-7], "deep": {"b": None, "a": True}}}}
    ],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Says it's \"nice\" <or> not & more", "parameters": {"type": "object", "properties": {"zip": {"type": "string"}, "city": {"type": "string", "enum": ["Zürich", "北京"]}}, "required": ["zip"]}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
TOOL_TALK = [S("Use tools."), U("Weather?"), CALL, {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "{\"t\": 21}"}, A("21 °C"), U("Thanks")]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]}]
THINK = [U("2+2?"), {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}, U("3+3?"), {"role": "assistant", "content": "6", "reasoning_content": "\nadd again\n"}, U("And?")]

CASES = []


def case(name, template, messages=TALK, **arguments):
    CASES.append({"name": name, "template": template, "messages": messages, "arguments": arguments})


CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}
"""
case("chatml_with_system", CHATML)
case("chatml_default_system", CHATML, SHORT)
case("chatml_lines", """
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {{- message.content | trim }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""")

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- A system turn is taken out so that it can be extended. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You may call these:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
case("llama3", LLAMA3)
case("llama3_date_given", LLAMA3, SHORT, date_string="01 Jan 2025")
case("llama3_tools_in_user", LLAMA3, TOOL_TALK, tools=TOOLS)
case("llama3_tools_in_system", LLAMA3, TOOL_TALK, tools=TOOLS, tools_in_user_message=False)
case("llama3_no_user_for_tools", LLAMA3, [S("x")], tools=TOOLS)

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 2 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 2!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""
case("mistral", MISTRAL)
case("mistral_tools", MISTRAL, TOOL_TALK, tools=TOOLS)
case("mistral_must_alternate", MISTRAL, [U("a"), U("b")])
case("mistral_unknown_role", MISTRAL, [U("a"), {"role": "narrator", "content": "b"}])

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
case("qwen", QWEN)
case("qwen_tools", QWEN, TOOL_TALK, tools=TOOLS)
case("qwen_thinking", QWEN, THINK)
case("qwen_no_thinking", QWEN, THINK[:1], enable_thinking=False)
case("qwen_tool_result_last", QWEN, TOOL_TALK[:4], tools=TOOLS)

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
case("gemma", GEMMA)
case("gemma_parts", GEMMA, PARTS)
case("gemma_must_alternate", GEMMA, [A("first")])
case("gemma_none_content", GEMMA, [{"role": "user", "content": None}])

case("generation_tags", """{% for m in messages %}
{% if m.role == 'assistant' %}
  {% generation %}
  {{ m.content }}{% set leak = 1 %}
  {% endgeneration %}
{% else %}
{{ m.role }}: {{ m.content }}
{% endif %}
{% endfor %}
{{ leak is defined }}""")
case("generation_tight", "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}")

# tojson
DATA = {"z": 1, "a": [True, False, None, 1.5, -2, 1e20, 1e-5, 123456789012], "ü": "é\n\t\"\\\u0007</script>'&\u2028", "e": {}, "l": [], "n": {"k": [{"x": []}]}}
case("tojson", "{{ data|tojson }}", SHORT, data=DATA)
case("tojson_indent", "{{ data|tojson(indent=2) }}", SHORT, data=DATA)
case("tojson_indent_positional_ascii", "{{ data|tojson(ensure_ascii=true, indent=1) }}", SHORT, data=DATA)
case("tojson_sorted_separators", "{{ data|tojson(sort_keys=true, separators=(',', ':')) }}", SHORT, data=DATA)
case("tojson_scalars", "{{ 1|tojson }} {{ 'a'|tojson }} {{ none|tojson }} {{ true|tojson }} {{ 2.0|tojson }} {{ (1, 2)|tojson }} {{ {1: 2, 'b': none}|tojson }}", SHORT)
case("tojson_undefined", "{{ nothing|tojson }}", SHORT)
case("tojson_whole_message", "{{ messages|tojson }}", TOOL_TALK)

# strings
case("string_methods", "{{ s.strip() }}|{{ s.lstrip() }}|{{ s.rstrip() }}|{{ s.upper() }}|{{ s.lower() }}|{{ s.title() }}|{{ s.capitalize() }}|{{ s.strip(' a') }}", SHORT, s="  an Apple, über aa ")
case("string_search", "{{ s.find('b') }} {{ s.find('x') }} {{ s.rfind('b') }} {{ s.count('ab') }} {{ s.startswith('ab') }} {{ s.endswith(('x', 'c')) }} {{ s.replace('ab', 'X', 1) }} {{ s.replace('b', '') }}", SHORT, s="ababäc")
case("string_split", "{{ s.split(',') }} {{ s.split(',', 1) }} {{ s.split() }} {{ s.rsplit(',', 1) }} {{ t.splitlines() }} {{ s.partition(',')|list }} {{ s.rpartition(',')[0] }}", SHORT, s="a,b c,d", t="one\ntwo\r\nthree\n")
case("string_prefixes", "{{ s.removeprefix('<t>') }} {{ s.removesuffix('</t>') }} {{ s.removeprefix('x') }}", SHORT, s="<t>body</t>")
case("string_predicates", "{{ 'a1'.isalnum() }} {{ 'ab'.isalpha() }} {{ '12'.isdigit() }} {{ 'AB'.isupper() }} {{ 'ab'.islower() }} {{ ' '.isspace() }} {{ ''.isdigit() }}", SHORT)
case("string_slices", "{{ s[1:3] }} {{ s[:-1] }} {{ s[::-1] }} {{ s[-2] }} {{ s[10:] }}|{{ s|length }} {{ s|first }} {{ s|last }}", SHORT, s="añb日c")
case("string_join_format", "{{ ', '.join(l) }} {{ l|join(' | ') }} {{ '%s has %d'|format('x', 3) }} {{ '{} {}'.format('a', 1) }} {{ 'ab' * 2 }} {{ 'a' 'b' }}", SHORT, l=["x", "y"])
case("string_escapes", "{{ 'a\\tb\\\\n\\'q\\' \\u00e9' }} {{ \"d\\\"q\" }}", SHORT)
case("string_filters", "{{ s|upper }} {{ s|capitalize }} {{ s|title }} {{ s|replace('a', 'b') }} {{ s|trim }}| {{ s|indent(4) }} {{ s|indent(2, true) }} {{ '<a>'|e }} {{ 'x'|safe }}", SHORT, s="an a\nline\n\nend ")

# numbers, truth, none
case("printing", "{{ true }} {{ false }} {{ none }} {{ 1.0 }} {{ 1e20 }} {{ 0.00001 }} {{ 0.1 }} {{ 3 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 10 / 5 }} {{ [1, 'a', none, true, 1.5] }} {{ {'a': 'b', 'c': [1]} }} {{ (1, 'x') }} {{ (1,) }} {{ \"it's\" }} {{ [\"it's\"] }}", SHORT)
case("truthiness", "{{ 'y' if '' else 'n' }}{{ 'y' if [] else 'n' }}{{ 'y' if {} else 'n' }}{{ 'y' if 0 else 'n' }}{{ 'y' if none else 'n' }}{{ 'y' if nothing else 'n' }}{{ 'y' if ' ' else 'n' }} {{ not nothing }} {{ none is none }} {{ nothing is defined }} {{ '' or 'x' }} {{ 'a' and 'b' }} {{ none or [] }}", SHORT)
case("comparisons", "{{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ 1 < 2 < 3 }} {{ 'a' in 'cat' }} {{ 'k' in {'k': 1} }} {{ 2 not in [1] }} {{ [1] == [1] }} {{ {'a': 1} == {'a': 1} }} {{ none == false }} {{ 1 is number }} {{ 'a' is string }} {{ true is boolean }} {{ 5 is odd }}", SHORT)
case("kinds", "{% for v in ['s', [1], {'a': 1}, 3, none] %}{{ v is string }}{{ v is iterable }}{{ v is sequence }}{{ v is mapping }}{{ v is number }} {% endfor %}", SHORT)
case("undefined_prints_nothing", "[{{ nothing }}][{{ messages[0].nothing }}][{{ messages[0]['nothing'] }}][{{ nothing|default('d') }}][{{ none|default('d') }}][{{ ''|default('d', true) }}][{% for x in nothing %}x{% endfor %}]", SHORT)
case("undefined_attribute_fails", "{{ nothing.more }}", SHORT)
case("undefined_index_out_of_range", "[{{ messages[5] }}]{{ messages[5] is defined }}", SHORT)
case("undefined_concatenation_fails", "{{ 'a' + nothing }}", SHORT)
case("none_concatenation_fails", "{{ 'a' + none }}", SHORT)
case("none_content_prints_none", "{{ messages[0].content }}|{{ 'a' ~ messages[0].content ~ 1 }}", [CALL])
case("number_concatenation_fails", "{{ 'a' + 1 }}", SHORT)

# loops, scopes, macros
case("loop_variables", "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if not loop.last }};{% endfor %}")
case("loop_controls", "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.index == 4 %}{% break %}{% endif %}{{ m.role }} {% endfor %}")
case("loop_else_and_filter", "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}{% for m in [] %}x{% else %}empty{% endfor %}")
case("loop_unpacking", "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in d|dictsort %}{{ k }}{% endfor %}{% for k in d %}{{ k }}{% endfor %}{{ d.keys()|list }}{{ d.values()|list }}{{ d.get('q') }}{{ d.get('q', 'w') }}{{ d|items|list }}", SHORT, d={"z": 1, "a": "x"})
case("scopes", "{% set x = 1 %}{% for i in [1, 2] %}{% set x = i + 5 %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 9 %}{% endif %}{{ x }}{% with y = 3 %}{{ y }}{% endwith %}{{ y is defined }}")
case("namespaces", "{% set ns = namespace(found=false, n=0, l=[]) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.found = true %}{% set ns.n = ns.n + 1 %}{% set ns.l = ns.l + [m.role] %}{% endif %}{% endfor %}{{ ns.found }} {{ ns.n }} {{ ns.l }}")
case("macros", "{% macro turn(role, text='none', end='\\n') -%}<{{ role }}>{{ text }}{{ end }}{%- endmacro %}{% for m in messages %}{{ turn(m.role, m.content) }}{% endfor %}{{ turn('x', end='!') }}{{ turn('y') }}")
case("macro_recursion", "{% macro walk(v, depth=0) %}{% if v is mapping %}{% for k, w in v.items() %}{{ '  ' * depth }}{{ k }}:\n{{ walk(w, depth + 1) }}{% endfor %}{% elif v is sequence and v is not string %}{% for w in v %}{{ walk(w, depth + 1) }}{% endfor %}{% else %}{{ '  ' * depth }}{{ v }}\n{% endif %}{% endmacro %}{{ walk(tools) }}", SHORT, tools=TOOLS)
case("set_blocks_and_call", "{% set body %}a {{ 1 }}\n{% endset %}[{{ body }}]{% set up | upper %}x{% endset %}{{ up }}{% filter upper %}abc{% endfilter %}{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in{% endcall %}")
case("list_filters", "{{ messages|map(attribute='role')|list }} {{ messages|map(attribute='role')|unique|list }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ messages|rejectattr('role', 'equalto', 'user')|map(attribute='content')|first }} {{ [3, 1, 2]|sort }} {{ [1, 2]|sum }} {{ [1, 2, 3]|reverse|list }} {{ ['a', 'b']|last }} {{ [1, 5]|max }} {{ range(3)|list }} {{ range(1, 7, 2)|list }} {{ [1, 2, 3]|batch(2)|list }} {{ ['', 'x']|select|list }} {{ 'abc'|list }}")
case("list_slices", "{{ l[1:] }}{{ l[:2] }}{{ l[-1] }}{{ l[::-1] }}{{ l[-2:] }}{{ l[5:] }}{{ l + [9] }}{{ l|length }}{{ l * 2 }}", SHORT, l=[1, 2, 3])
case("conversions", "{{ '12'|int + 1 }} {{ '1.5'|float }} {{ 3.7|int }} {{ 5|string + 'x' }} {{ 'x'|int(7) }} {{ 2.5|round }} {{ 2.567|round(2) }} {{ -3|abs }} {{ 1|float }}", SHORT)

# whitespace
case("whitespace", "  {% if true %}\n    a\n  {% endif %}\n\n  b {%- if true %}  c{% endif -%}   \n  d\n {# note #}\n e {#- note -#} f\n{{ 'x' }}\n  {{- 'y' -}}  \n z\n")
case("whitespace_plus", "  {%+ if true %}\n a{% endif +%}\n b\n")
case("raw", "{% raw %}{{ not }} {% if %}{% endraw %}|{%- raw -%} {{ x }} {%- endraw -%}| {{ '{{' }}")
case("trailing_newlines", "a\n\n", SHORT)
case("inline_if_and_ternary", "{{ 'a' if messages|length > 1 else 'b' }}{{ 'q' if false }}{{ ('x' if true else 'y') ~ 'z' }}")
case("strftime", "{{ strftime_now('%d %B %Y') }} {{ strftime_now('%Y-%m-%d %H:%M:%S %A %b %j %I %p %y %%') }}", SHORT)
case("raise_in_branch", "{% if messages[0].role != 'system' %}{{ raise_exception('A system turn is needed: \"' ~ messages[0].role ~ '\" came first') }}{% endif %}ok", SHORT)
case("documents", "{% if documents %}{% for d in documents %}{{ loop.index }}. {{ d['title'] }}: {{ d.text }}\n{% endfor %}{% endif %}{{ tools is none }}", SHORT, documents=[{"title": "T", "text": "body"}])
case("attributes_and_methods_of_maps", "{{ d['items'] }} {{ d.get('items') }} {{ d.name }}", SHORT, d={"items": 1, "name": "n"})
case("nested_access", "{{ messages[-1]['content'] }} {{ (messages|last).role }} {{ messages[0]['tool_calls'][0]['function']['arguments']['deep']['a'] if messages[0].tool_calls else 'no' }} {{ messages|length - 1 }}")
case("dict_literals", "{% set d = {'a': 1, 'b': {'c': [1, 2]}} %}{{ d.b.c[1] }} {{ d|length }} {{ dict(x=1) }} {{ d['a'] }} {{ 'a' in d }} {{ d|tojson }}", SHORT)
case("sandbox_forbids_changes", "{% set _ = messages.append(1) %}", SHORT)

for one in CASES:
    context = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    context.update(one["arguments"])
    context["messages"] = one["messages"]
    try:
        one["expected"] = environment.from_string(one["template"]).render(**context)
    except Refused as refusal:
        one["refused"] = str(refusal)
    except jinja2.exceptions.TemplateSyntaxError:
        raise
    except Exception as failure:
        one["fails"] = f"{type(failure).__name__}: {failure}"

with open("fixtures/templates.json", "w", encoding="utf-8", newline="\n") as out:
    json.dump(CASES, out, ensure_ascii=False, indent=1)
    out.write("\n")
