"""Chat templates are foreign code: they see the messages, and nothing else, within limits."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from leftfold.text import ChatTemplate, TemplateError, TokenizerError, load_tokenizer, template_limits
from leftfold.text.chat_template import MAX_TEMPLATE_CHARS
from tests.tiny_folder import TEMPLATE, byte_tokenizer, write_tokenizer

HI = [{"role": "user", "content": "hi"}]


def render(source: str, **values: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HI, **values)


def test_a_template_as_models_have_it() -> None:
    text = ChatTemplate(TEMPLATE, {}).render(HI)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert not ChatTemplate(TEMPLATE, {}).render(HI, add_generation_prompt=False).endswith("assistant\n")


def test_what_templates_of_the_field_use() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}") == "<s>hi"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert render("{{ 'a' ~ 1 ~ messages[0].content }}{{ 7 % 4 }}{{ '%s!' % 'x' }}{{ 'a' + 'b' }}") == "a1hi3x!ab"
    assert render("{% if tools is defined %}{{ tools }}{% endif %}", tools="T") == "T"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_a_template_may_refuse() -> None:
    with pytest.raises(TemplateError, match="refuses the messages: only users"):
        render("{{ raise_exception('only users') }}")


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{% set _ = messages.append(1) %}",
    "{{ messages[0].update({'content': 'x'}) }}",
])  # fmt: skip
def test_no_way_out_of_the_sandbox(source: str) -> None:
    try:
        text = render(source)
    except TemplateError:
        return
    assert not any(word in text for word in ("uid=", "module", "builtins", "class"))


@pytest.mark.parametrize("source", [
    "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}",
    "{% set r = range(1000) | list %}{% for a in r %}{% for b in r %}{{ c }}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in range(10 ** 9) %}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * [1] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{% set ns = namespace(s='xx') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% for a in range(1000) %}{{ 'x' * 100000 }}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 'x'.ljust(300000000) }}",
    "{{ 'x'.rjust(300000000) }}{{ '1'.zfill(300000000) }}",
    "{{ 'x'.center(width=300000000) }}",
    "{{ ('\t' * 1000).expandtabs(300000) }}",
    "{{ '{:>300000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 300000000) }}",
    "{{ '{a:>300000000}'.format_map({'a': 1}) }}",
    "{{ '%*d' | format(300000000, 1) }}",
    "{{ '%(a(b)c)300000000d' | format(**{'a(b)c': 1}) }}",
    "{{ '%.300000000d' % 1 }}",
    "{{ ('%s' * 9000) | format(*(['x' * 90000] * 9000)) }}",
    "{% set s = 'x' * 90000 %}{{ s.join(['a'] * 9000) }}",
    "{% set s = 'x' * 90000 %}{{ (['a'] * 9000) | join(s) }}",
    "{% set s = 'x' * 90000 %}{{ s.replace('x', s) }}",
    "{% set s = 'x' * 90000 %}{{ s | replace('x', s) }}",
    "{% set s = 'x' * 90000 %}{{ s.replace('', s) }}",
    "{{ 'x' | indent(300000000, true) }}",
    "{{ {'a': 1} | tojson(indent=300000000) }}",
    "{{ 'x' | batch(300000000, 'y') | list }}",
    "{{ lipsum(n=300000000) }}",
    "{{ strftime_now('%300000000d') }}",
    "{% set ns = namespace(i=3) %}{% for a in range(64) %}{% set ns.i = ns.i * ns.i %}{% endfor %}",
    "{% set ns = namespace(i=3) %}{% for a in range(64) %}{% set ns.i = ns.i ** 2 %}{% endfor %}",
    "{% set ns = namespace(i=2.0) %}{% for a in range(64) %}{% set ns.i = ns.i ** 99 %}{% endfor %}",
    "{% set ns = namespace(a=[1]) %}{% for a in range(64) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace(a=[1]) %}{% for a in range(64) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[]) %}{% for a in range(9999) %}{% set ns.a = ns.a + ['x' * 99999 ~ a] %}{% endfor %}",
    "{% set __burn = 1 %}{% for a in range(10 ** 4) %}{% for b in range(10 ** 4) %}{% endfor %}{% endfor %}",
])  # fmt: skip
def test_limits_end_a_template_that_does_not(source: str) -> None:
    with pytest.raises(TemplateError) as error:
        render(source)
    assert len(str(error.value)) < 300


def test_string_operations_within_limits_are_as_in_python() -> None:
    assert render("{{ 'x'.ljust(3) }}{{ 'x'.center(3, '-') }}{{ '7'.zfill(3) }}|") == "x  -x-007|"
    assert render("{{ '{:>4}|{a}'.format(1, a='b') }}{{ '{a}'.format_map({'a': 2}) }}") == "   1|b2"
    assert render("{{ '%3d %% %s' | format(7, 'x') }}{{ '%(k)s' | format(k=1) }}") == "  7 % x1"
    assert render("{{ ', '.join(['a', 'b']) }}{{ ['c', 1] | join('-') }}") == "a, bc-1"
    assert render("{{ messages | join('', attribute='role') }}") == "user"
    assert render("{{ 'aXbX'.replace('X', 'yy', 1) }}{{ 'ab' | replace('b', 'c') }}") == "ayybXac"
    assert render("{{ 'a\\nb' | indent(2) }}") == "a\n  b"
    assert render("{{ 2 ** 10 }} {{ 3 * 4 }} {{ 7 in (7, 8) }} {{ [1, 2] == [1, 2] }} {{ {'a': 1}.a }}") == (
        "1024 12 True True 1"
    )
    unpacked = "{% set a, b = 1, 2 %}{% for k, v in {'x': 3}.items() %}{{ a }}{{ b }}{{ k }}{{ v }}{% endfor %}"
    assert render(unpacked) == "12x3"
    assert render("{{ messages | map(attribute='content') | list }}{{ [3, 1] | sort | first }}") == "['hi']1"


def test_a_rendering_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.0)
    with pytest.raises(TemplateError, match="too long"):
        render("{% for a in range(9) %}{% endfor %}")


def test_padding_is_bounded() -> None:
    assert len(render("{{ 'x' | center(1000000000) }}")) <= 1000


def test_a_template_too_long_or_broken_is_refused() -> None:
    with pytest.raises(TemplateError, match="characters, more than"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1), {})
    with pytest.raises(TemplateError, match="not valid"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(TemplateError, match="fails on these messages"):
        render("{{ 1 // 0 }}")


def test_messages_do_not_leak_from_one_rendering_to_the_next() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ extra }}", {})
    assert template.render(HI, extra=1) == "hi1"
    assert template.render([{"role": "user", "content": "yo"}]) == "yo"


# Tokenizers from folders


def test_a_folder_gives_tokens_template_and_every_end(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, {"eos_token_id": 256})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 0]}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (258, 0, 256)
    assert tokenizer.tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode_chat(HI)[0] == 257
    assert tokenizer.decode(tokenizer.encode_chat(HI)) == "user\nhi\nassistant\n"


def test_a_template_file_goes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, {})
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(folder).render_chat(HI) == "from the file"


def test_a_folder_without_template_says_what_to_use(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TemplateError, match="/v1/completions"):
        load_tokenizer(tmp_path).render_chat(HI)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_broken_files_are_named(tmp_path: Path, file: str) -> None:
    folder = write_tokenizer(tmp_path, {})
    (folder / file).write_text("{")
    with pytest.raises(TokenizerError, match=file) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(tmp_path)
    assert str(error.value) == (
        f"no usable tokenizer in {tmp_path}: it has none of tokenizer.json, vocab.json, vocab.txt, tokenizer.model, "
        "*.tiktoken; copy the files of the model's tokenizer there"
    )


@pytest.mark.parametrize("config", ["{}", '{"model_type": "foo"}', '{"model_type": "llama"}', '{"model_type": 5}'])
@pytest.mark.parametrize("files", [
    {"tokenizer_config.json": "{}"}, {"vocab.json": '{"a": 0}', "merges.txt": ""}, {"tokenizer.model": "x"},
    {"vocab.txt": "\xff"},
], ids=["settings", "pairs", "pieces", "words"])  # fmt: skip
def test_what_no_tokenizer_can_be_made_of_is_told_in_whole_sentences_and_nothing_beside(
    tmp_path: Path, config: str, files: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"config.json": config, **files}.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    import transformers  # which sets its level when it is loaded

    level = logging.getLogger(transformers.__name__).level
    try:
        load_tokenizer(tmp_path)  # of some of these one can be made, if not one of use
    except TokenizerError as error:
        reason = str(error).removeprefix(f"no usable tokenizer in {tmp_path}: ")
        assert reason != str(error) and "\n" not in reason and not reason.endswith(":")
    assert tuple(capfd.readouterr()) == ("", "")
    assert logging.getLogger("transformers").level == level
