"""Chat templates: the model's own Jinja program that writes a conversation as one text."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graphrt.errors import ModelError, RequestError
from graphrt.jsonfile import read_json
from graphrt.tokenizer import special_tokens


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations. Made by `load`; `available` is False for a model that has no template."""

    def __init__(self, sources: dict[str, str], special: dict[str, str], where: str) -> None:
        self._where = where
        self._special = special
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ModelError(f"{where}: the chat template is malformed: {error}") from None

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """From chat_template.jinja, chat_template.json or tokenizer_config.json, in this order. ModelError if malformed."""
        model_dir = Path(model_dir)
        sources, where = _find(model_dir)
        return cls(sources, special_tokens(model_dir), str(where))

    @property
    def available(self) -> bool:
        """Whether the model has a template."""
        return bool(self._templates)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The text of a conversation; `kwargs` reach the template (`tools`, `enable_thinking` and so on).

        RequestError when the template refuses the messages or fails on them, or when there is none.
        """
        if not self._templates:
            raise RequestError(f"{self._where} has no chat template: it is not a chat model", param="messages")
        wanted = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        template = self._templates.get(wanted) or next(iter(self._templates.values()))
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special, **kwargs}
        try:
            return template.render(values, messages=messages, add_generation_prompt=add_generation_prompt)
        except _Refusal as error:
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from None
        except Exception as error:  # a template is a program: it fails in as many ways as Python does
            what = str(error) or type(error).__name__
            raise RequestError(f"the chat template fails on these messages: {what}", param="messages") from None


class _Refusal(Exception):
    """What a template's own raise_exception means."""


def _find(model_dir: Path) -> tuple[dict[str, str], Path]:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}, path
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = model_dir / name
        value = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(value, str):
            return {"default": value}, path
        if isinstance(value, list):
            try:
                return {item["name"]: item["template"] for item in value}, path
            except (TypeError, KeyError):
                raise ModelError(f"{path}: chat_template is not a list of names and templates") from None
        if value is not None:
            raise ModelError(f"{path}: chat_template is of type {type(value).__name__}, expected a string or a list")
    return {}, model_dir


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML and sorts keys: models were trained on neither.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
