"""The readable page at /docs: one file of HTML that loads nothing."""

from __future__ import annotations

import html
from typing import Any

from graphrt.api.example import curl_example

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 .3rem; border-top: 1px solid var(--line); padding-top: 1.2rem; font-size: 1.15rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: 15px; }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
.verb { text-transform: uppercase; font-size: .8em; opacity: .7; margin-right: .5em; }
.must { opacity: .7; font-size: .85em; }
"""


def make_page(document: dict[str, Any], url: str, model_name: str) -> str:
    """The page of an OpenAPI document; `url` is where the reader's browser found the server."""
    schemas = document["components"]["schemas"]
    parts = [
        f"<h1>{_e(document['info']['title'])} <small>{_e(document['info']['version'])}</small></h1>",
        f"<p>{_e(document['info']['description'])} The same for machines: <a href='openapi.json'>openapi.json</a>.</p>",
        f"<pre>{_e(curl_example(url, model_name))}</pre>",
        _contents(document["paths"]),
    ]
    shown: list[str] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation, schemas, shown))
    parts.append("<h1>Types</h1>")
    for name in shown:  # grows by the types that these mention
        parts.append(f"<h2 id='{_e(name)}'>{_e(name)}</h2>" + _schema(schemas[name], shown))
    title = _e(document["info"]["title"])
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{title}</title>"
    return (
        f"<!doctype html><html lang='en'><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _contents(paths: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><a href='#{_e(method + path)}'><code>{_e(path)}</code></a></td><td>{_e(operation['summary'])}</td></tr>"
        for path, methods in paths.items()
        for method, operation in methods.items()
    )
    return f"<table>{rows}</table>"


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any], shown: list[str]) -> str:
    parts = [
        f"<h2 id='{_e(method + path)}'><span class='verb'>{method}</span><code>{_e(path)}</code></h2>",
        f"<p>{_e(operation['summary'])}.</p>",
    ]
    if operation.get("parameters"):
        parts.append(
            _rows(
                [(p["name"], p["schema"], p["required"], p.get("description", "")) for p in operation["parameters"]],
                shown,
            )
        )
    if "requestBody" in operation:
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        parts.append(_schema(schemas[name], shown))
    rows = []
    for status, reply in operation["responses"].items():
        kinds = " or ".join(f"{_e(media)} {_type(c['schema'], shown)}" for media, c in reply["content"].items())
        about = [reply["description"], *(c["schema"].get("description", "") for c in reply["content"].values())]
        rows.append(
            f"<tr><td><code>{status}</code></td><td>{_e(' '.join(filter(None, about)))}</td><td>{kinds}</td></tr>"
        )
    parts.append(f"<table><tr><th>status</th><th></th><th>body</th></tr>{''.join(rows)}</table>")
    return "".join(parts)


def _schema(schema: dict[str, Any], shown: list[str]) -> str:
    required = schema.get("required", ())
    fields = schema.get("properties", {}).items()
    rows = [(name, field, name in required, field.get("description", "")) for name, field in fields]
    return f"<p>{_e(schema.get('description', ''))}</p>" + _rows(rows, shown)


def _rows(rows: list[tuple[str, dict[str, Any], bool, str]], shown: list[str]) -> str:
    cells = "".join(
        f"<tr><td><code>{_e(name)}</code>{' <span class=must>required</span>' if must else ''}</td>"
        f"<td>{_type(schema, shown)}</td><td>{_e(text)}</td></tr>"
        for name, schema, must, text in rows
    )
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{cells}</table>"


def _type(schema: dict[str, Any], shown: list[str]) -> str:
    """A type in words, its limits behind it. Types with a name of their own are links, and noted in `shown`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in shown:
            shown.append(name)
        return f"<a href='#{_e(name)}'>{_e(name)}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(variant, shown) for variant in schema["anyOf"] if variant.get("type") != "null")
    if "enum" in schema:
        return " | ".join(f"<code>{_e(repr(value))}</code>" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" and "items" in schema:
        kind = f"list of {_type(schema['items'], shown)}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"object of {_type(schema['additionalProperties'], shown)}"
    limits = [
        f"{sign} {schema[name]}"
        for name, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("minItems", "at least"),
            ("maxItems", "at most"),
            ("maxProperties", "at most"),
            ("minLength", "at least"),
            ("maxLength", "at most"),
        )
        if name in schema
    ]
    return f"{kind} {', '.join(limits)}".strip()


def _e(text: str) -> str:
    return html.escape(text)
