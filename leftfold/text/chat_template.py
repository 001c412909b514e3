"""Renders chat templates, which come with models and so are foreign code: in a sandbox and within limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from leftfold.text import template_limits as limits
from leftfold.text.errors import TemplateError
from leftfold.text.template_filters import wary_filters, wary_tests
from leftfold.text.template_limits import MAX_TEXT_CHARS, checked, weigh

MAX_TEMPLATE_CHARS = 256 * 1024


class _GenerationTag(Extension):
    """Lets `{% generation %}…{% endgeneration %}` through, which some templates use to mark the model's own text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Formatter(SandboxedFormatter):
    """`str.format`, whose fields pad within limits."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        limits.narrow(format_spec)
        weigh(value)
        return checked(super().format_field(value, format_spec))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with values of bounded size; what is planted in templates is found here, out of their reach."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            optimized=False,  # nothing is computed before a rendering begins
            finalize=checked,
        )
        self.filters.clear()
        self.filters.update(wary_filters())
        self.tests.update(wary_tests())
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]
        self.burn = limits.burn
        self.join = _join
        self.checked = checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "*":
                limits.product(left, right)
            case "**":
                limits.power(left, right)
            case "%" if isinstance(left, str):
                limits.percent(left, right)
        return checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(owner, bytes):
            raise TemplateError("the chat template calls a method of bytes, which it may not")
        if isinstance(owner, str):
            weigh(*args, *kwargs.values())
            if name in limits.METHODS:
                return limits.METHODS[name](str(owner), *args, **kwargs)
            if name in limits.METHOD_CHECKS:
                limits.METHOD_CHECKS[name](owner, *args, **kwargs)
        return checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is None:
            return None
        text, mapped = str(value.__self__), value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            fields = text.count("{") * weigh(*args, *kwargs.values())
            if fields > 8 * MAX_TEXT_CHARS:
                raise limits.too_large("a format of that many values")
            given = ((), args[0]) if mapped else (args, kwargs)
            return str(checked(_Formatter(self).vformat(text, *given)))

        return formatted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Planted().visit(super()._parse(source, name, filename))
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(_planted("burn", [], node.lineno)).set_lineno(node.lineno))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]


def _planted(function: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of what is an attribute of the environment, which no name in a template can stand for."""
    return nodes.Call(nodes.EnvironmentAttribute(function, lineno=line), arguments, [], None, None, lineno=line)


class _Planted(NodeTransformer):
    """`a ~ b`, literals of lists and mappings, and what is compared go through calls that look at their size."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _planted("join", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Call:
        self.generic_visit(node)
        return _planted("checked", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:
        self.generic_visit(node)
        return _planted("checked", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _planted("checked", [node], node.lineno) if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = _planted("checked", [side.expr], node.lineno)
        return node


def _join(*values: Any) -> str:
    return limits.joined("", values)


def _raise_exception(message: Any) -> None:
    raise TemplateError(f"the chat template refuses the messages: {message}")


def _strftime_now(form: Any) -> str:
    form = str(form)
    limits.narrow(form)
    if len(form) > limits.MAX_WIDTH:
        raise limits.too_large("a date that long")
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled chat template. Raises TemplateError if it is too long or not valid Jinja."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        environment = _Environment()
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
        try:
            with limits.metered(limits.MAX_SECONDS):
                return self._text(variables, add_generation_prompt)
        except TemplateError:
            raise
        except Exception as error:  # foreign code: whatever it raises is the template's refusal
            raise TemplateError(f"the chat template fails on these messages: {error}") from error

    def _text(self, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(variables, add_generation_prompt=add_generation_prompt):
            size += len(piece)
            if size > MAX_TEXT_CHARS:
                raise TemplateError(f"the chat template gives more than {MAX_TEXT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)
