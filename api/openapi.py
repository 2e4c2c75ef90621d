"""The API as an OpenAPI 3.1 document, made of the very types that decode requests and write replies."""

from __future__ import annotations

from typing import Any

import msgspec

from graphrt import __version__
from graphrt.api.errors import ErrorReply
from graphrt.api.openapi_paths import OPERATIONS, STATUSES, Operation, statuses
from graphrt.api.reply_schema import Health
from graphrt.api.settings import ServerSettings
from graphrt.seam.records import EngineInfo

_REF = "#/components/schemas/{name}"


def make_document(settings: ServerSettings, info: EngineInfo) -> dict[str, Any]:
    """The document of a server with these settings and this engine."""
    types = {t for o in OPERATIONS for t in (o.body, o.reply, o.event) if t is not None} | {ErrorReply}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda t: t.__name__), ref_template=_REF)
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            _lift_description(field)
            if schema["title"].endswith("Request"):
                _fit(name, field, settings.model_name, info)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "graphrt",
            "version": __version__,
            "description": "An OpenAI-compatible server for language models. Fields that it does not know are ignored.",
        },
        "paths": {},
        "components": {"schemas": schemas},
    }
    for operation in OPERATIONS:
        document["paths"].setdefault(operation.path, {})[operation.method] = _operation(operation, settings)
    if settings.api_key_files:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(operation: Operation, settings: ServerSettings) -> dict[str, Any]:
    possible = statuses(operation, settings)
    made: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": (operation.method + operation.path).replace("/", "_").strip("_").translate(_PLAIN),
        "responses": {str(status): _response(operation, status) for status in possible},
    }
    if operation.parameters:
        made["parameters"] = list(operation.parameters)
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(operation.body)}}}
    if 401 in possible:
        made["security"] = [{"key": []}]
    return made


_PLAIN = str.maketrans({"{": None, "}": None, ".": "_"})


def _response(operation: Operation, status: int) -> dict[str, Any]:
    text = STATUSES[status]
    if status != 200:
        # These two answer with their own body when the server takes no requests.
        body = Health if status == 503 and operation.reply is Health else ErrorReply
        made: dict[str, Any] = {"description": text, "content": {"application/json": {"schema": _ref(body)}}}
        if status == 429:
            made["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}}
        return made
    if operation.reply is None:
        plain = {"type": "object"} if operation.media == "application/json" else {"type": "string"}
        return {"description": text, "content": {operation.media: {"schema": plain}}}
    content: dict[str, Any] = {"application/json": {"schema": _ref(operation.reply)}}
    if operation.event is not None:
        about = f"Lines `data: ` with a {operation.event.__name__} each, the last `data: [DONE]`."
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(operation.event)}
        content["text/event-stream"] = {
            "schema": {"type": "object", "description": about, "properties": {"data": data}, "required": ["data"]}
        }
    return {"description": text, "content": content}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _lift_description(field: dict[str, Any]) -> None:
    """msgspec puts a description beside its type; of a field that may be null it belongs to the whole."""
    for variant in field.get("anyOf", ()):
        text = variant.pop("description", None)
        if text and "description" not in field:
            field["description"] = text


def _fit(name: str, field: dict[str, Any], model_name: str, info: EngineInfo) -> None:
    """Tell a request's limits that come from the model."""
    for variant in field.get("anyOf", [field]):
        if name == "model" and variant.get("type") == "string":
            variant["enum"] = [model_name]
        elif name in ("max_tokens", "max_completion_tokens", "min_tokens") and variant.get("type") == "integer":
            variant["maximum"] = info.context - 1
        elif name in ("stop_token_ids", "tokens", "prompt") and variant.get("type") == "array":
            _fit_ids(variant["items"], info.vocab_size)


def _fit_ids(schema: dict[str, Any], vocab_size: int) -> None:
    for variant in schema.get("anyOf", [schema]):
        if variant.get("type") == "integer":
            variant.update(minimum=0, maximum=vocab_size - 1)
        elif variant.get("type") == "array":
            _fit_ids(variant["items"], vocab_size)
