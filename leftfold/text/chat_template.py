"""Renders chat templates, which come with models and so are foreign code: in a sandbox and within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from leftfold.text.errors import TemplateError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_TEXT_CHARS = 8 * 1024 * 1024
MAX_TURNS = 100_000
_MAX_REPEAT = 100_000
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*\d{4}")


class _Fuel:
    """Every turn of a loop and every call of a macro burns one; an empty tank ends the rendering."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    def burn(self) -> str:
        self.left -= 1
        if self.left < 0:
            raise TemplateError(f"the chat template runs for more than {MAX_TURNS} loop turns")
        return ""


class _GenerationTag(Extension):
    """Lets `{% generation %}…{% endgeneration %}` through, which some templates use to mark the model's own text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with values of bounded size and a fuel call planted in every loop and macro body."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1_000_000 or abs(right) > 64):
            raise SecurityError("a power that large is not allowed")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format that wide is not allowed")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | Sequence) and len(value) * times > _MAX_REPEAT:
                    raise SecurityError("a repetition that long is not allowed")
        return _bounded(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _BoundedJoins().visit(super()._parse(source, name, filename))
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            burn = nodes.Call(nodes.Name("__burn", "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(burn).set_lineno(node.lineno))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]


class _BoundedJoins(NodeTransformer):
    """`a ~ b` becomes a call that looks at the length of what it makes."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        join = nodes.Name("__join", "load", lineno=node.lineno)
        return nodes.Call(join, node.nodes, [], None, None, lineno=node.lineno)


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT_CHARS:
        raise SecurityError("a value that long is not allowed")
    return value


def _join(*values: Any) -> Any:
    return _bounded("".join(map(str, values)))


def _raise_exception(message: Any) -> None:
    raise TemplateError(f"the chat template refuses the messages: {message}")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    separators = options.get("separators")
    sort_keys = bool(options.get("sort_keys", False))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _padded(value: Any, width: int = 80) -> str:
    return str(value).center(min(int(width), 1000))


class ChatTemplate:
    """A compiled chat template. Raises TemplateError if it is too long or not valid Jinja."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters.update(tojson=_tojson, center=_padded)
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=lambda fmt: datetime.now().strftime(str(fmt))
        )
        self._tokens = dict(tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
        except (JinjaError, RecursionError) as error:
            raise TemplateError(f"the model's chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **values: Any
    ) -> str:
        """The prompt text of a conversation.

        `values` are further variables for the template (`tools`, …). Raises TemplateError if the template refuses
        the messages, fails on them or goes beyond its limits.
        """
        variables = {**values, **self._tokens, "messages": list(messages)}
        variables |= {"__burn": _Fuel(MAX_TURNS).burn, "__join": _join}
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables, add_generation_prompt=add_generation_prompt):
                size += len(piece)
                if size > MAX_TEXT_CHARS:
                    raise TemplateError(f"the chat template gives more than {MAX_TEXT_CHARS} characters")
                pieces.append(piece)
        except TemplateError:
            raise
        except Exception as error:  # foreign code: whatever it raises is the template's refusal
            raise TemplateError(f"the chat template fails on these messages: {error}") from error
        return "".join(pieces)
