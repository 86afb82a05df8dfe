"""A hostile chat template neither gets out of its sandbox nor keeps the run busy: it is an error in one sentence."""

import pytest

from pipeline.chat.template import ChatTemplate
from pipeline.errors import ConfigError, TemplateError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def render(source, messages=MESSAGES, **variables):
    return ChatTemplate(source, source, variables, "DIR").render(messages, [], True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% set messages[0]['content'] = 'x' %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_nothing_of_python_is_reached(source):
    with pytest.raises((TemplateError, ConfigError)) as refused:
        render(source)
    assert "DIR" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ 'x'|attr('__class__') }}",
        "{{ (1).__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_hidden_attributes_look_undefined(source):
    assert render(source) == ""


DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for _ in range(200) %%}{%% set ns.x = %s %%}{%% endfor %%}%s"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10**10**10 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999).join('b' * 99999) }}",
        "{{ ('\\n' * 99999) | indent(9999) }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ [1] | batch(999999999, 0) | list }}",
        "{{ [[1] * 7000] * 7000 }}",
        "{{ range(99999) | map('string') | map('center', 9999) | join }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        DOUBLE % ("'a'", "ns.x ~ ns.x", ""),
        DOUBLE % ("'a'", "ns.x + ns.x", ""),
        DOUBLE % ("'a'", "[ns.x, ns.x] | join", ""),
        DOUBLE % ("[1]", "ns.x * 2", ""),
        DOUBLE % ("[1]", "[ns.x, ns.x]", "{{ ns.x == [ns.x] }}"),
        DOUBLE % ("[1]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
        DOUBLE % ("3", "ns.x * ns.x", ""),
        "{% set ns = namespace(x='a') %}{% for _ in range(99) %}{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = x %}{% endfor %}",
    ],
)
def test_a_template_without_end_is_an_error(monkeypatch, source):
    monkeypatch.setattr("pipeline.chat.sandbox.MAX_COST", 10_000_000)  # to get there sooner
    with pytest.raises(TemplateError, match="^The chat template of DIR "):
        render(source)


def test_a_long_conversation_is_well_within_the_budget():
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim }}{{ m | tojson }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 2000}] * 500
    assert len(render(source, messages)) > 10_000_000


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ raise_exception('a\n' * 1000) }}", "a a a a a"),
    ],
)
def test_a_refusal_gives_the_templates_reason_on_one_line(source, why):
    with pytest.raises(TemplateError) as refused:
        render(source)
    text = str(refused.value)
    assert text.startswith(f"The chat template of DIR refused a conversation: {why}")
    assert "\n" not in text and len(text) < 400


def test_a_template_that_does_not_compile_is_named_with_its_line():
    with pytest.raises(ConfigError, match=r"The chat template of DIR can't be compiled: .* \(line 2\)"):
        render("\n{% if %}")


def test_the_date_stays_that_of_the_start():
    template = ChatTemplate("{{ strftime_now('%f') }}", "", {}, "DIR")
    assert template.render(MESSAGES, [], True) == template.render(MESSAGES, [], True)
    assert len(template.render(MESSAGES, [], True)) == 6


def test_json_is_written_as_transformers_writes_it():
    value = [{"role": "user", "content": "é<&'\"", "n": {"b": 1, "a": None}}]
    assert (
        render("{{ messages | tojson }}", value)
        == '[{"role": "user", "content": "é<&\'\\"", "n": {"b": 1, "a": null}}]'
    )
    assert render("{{ messages[0].n | tojson(indent=2) }}", value) == '{\n  "b": 1,\n  "a": null\n}'
    assert render("{{ messages[0].n | tojson(separators=(',', ':'), sort_keys=true) }}", value) == '{"a":null,"b":1}'
    assert render("{{ messages[0].content | tojson(ensure_ascii=true) }}", value) == '"\\u00e9<&\'\\""'
