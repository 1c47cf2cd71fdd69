"""`/docs`: the OpenAPI document as an HTML page, without scripts and external resources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
)
_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 0.9em/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; }
section { border-top: 1px solid var(--line); padding-top: .5rem; margin-top: 2rem; }
h2 code { background: var(--soft); padding: .1em .4em; border-radius: 4px; font-size: .85em; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); }
nav a { display: inline-block; margin-right: 1.2rem; }
"""


def page(description: Mapping[str, Any]) -> str:
    """The HTML page for an OpenAPI document."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(f'<a href="#{_id(item)}">{escape(item["summary"])}</a>' for _, _, item in operations)
    sections = "".join(_section(method, path, operation) for method, path, operation in operations)
    schemas = "".join(
        f'<h3 id="schema-{escape(name)}">{escape(name)}</h3>{_code(schema)}'
        for name, schema in description["components"]["schemas"].items()
    )
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{_prose(description['info']['description'])}</p>"
        f'<p>OpenAPI document: <a href="/openapi.json">openapi.json</a>.</p><nav>{links}</nav>'
        f"{sections}<section><h2>Schemas</h2>{schemas}</section></html>"
    )


def _id(operation: Mapping[str, Any]) -> str:
    return escape(operation["operationId"])


def _section(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [
        f'<section id="{_id(operation)}"><h2>{escape(operation["summary"])} <code>{method} {escape(path)}</code></h2>',
        f"<p>{_prose(operation['description'])}</p>",
        _parameters(operation["parameters"]),
        _body(operation.get("requestBody")),
        "<h3>Responses</h3>",
        _table(_responses(operation["responses"])),
        "</section>",
    ]
    return "".join(parts)


def _parameters(parameters: list[Mapping[str, Any]]) -> str:
    if not parameters:
        return ""
    rows = (
        (
            f"<code>{escape(item['name'])}</code>",
            item["in"] + (", required" if item.get("required") else ""),
            _prose(item.get("description", "")),
        )
        for item in parameters
    )
    return f"<h3>Parameters</h3>{_table(rows)}"


def _body(body: Mapping[str, Any] | None) -> str:
    if body is None:
        return ""
    media_type = body["content"]["application/json"]
    return f"<h3>Body</h3><p>{_link(media_type['schema'])}, for example:</p>{_code(media_type['example'])}"


def _responses(responses: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for status, response in responses.items():
        schemas = [_link(content["schema"]) for content in response.get("content", {}).values() if "schema" in content]
        yield f"<code>{escape(status)}</code>", _prose(response["description"]), " ".join(schemas)


def _link(schema: Mapping[str, Any]) -> str:
    name = escape(schema.get("$ref", "").rpartition("/")[2])
    return f'<a href="#schema-{name}">{name}</a>' if name else ""


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _code(value: object) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _prose(text: str) -> str:
    """The HTML of a text in which `backticks` mark code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
