"""`/docs`: the OpenAPI document as an HTML page, without scripts and external resources.

Each operation has an example for curl and one for the Python client, both made from the document. The problems that
every operation can return are listed once.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dispatcher.admission.problems import MEDIA_TYPE, PROBLEM_TYPES
from dispatcher.api.operation import BY_POST, operation_name
from dispatcher.client.operations import Method, Operations

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
)
_CODE: Final = re.compile(r"`([^`]+)`")
_IN_PATH: Final = re.compile(r"{(\w+)}")
_SENT: Final = """\
client.send(
    Email(
        message_key="order-17-receipt",
        sender={from!r},
        to={to!r},
        subject={subject!r},
        text={text!r},
    )
)"""
_CALLS: Final = {
    "create_sms": 'client.send(Sms(message_key="code-17", to="{to}", text="{text}"))',
    "create_emails": "client.send_many([Email(…), Email(…)])",
    "get_email_by_key": 'client.get_by_key("order-17-receipt")',
    "get_email": "client.get(email_id)",
    "list_emails": 'for email in client.find(recipient="ann@example.org"):\n    print(email.status, email.delivery)',
    "test_webhook": "client.test_webhook(webhook_id)",
    "list_captured": "captured_mail.all()  # the fixture of docs/testing.md",
    "wait_for_captured": 'captured_mail.wait_for(to="ann@example.org").link("Reset password")',
    "get_captured": 'captured_mail.wait_for(to="ann@example.org").text',
    "delete_captured": "captured_mail.clear()",
    "delete_all_captured": "captured_mail.clear()",
    "list_events": "for event in client.events():\n    print(event)",
}
"""The calls whose arguments are not those of the operation, by the operation's name."""


def page(description: Mapping[str, Any]) -> str:
    """The page of an OpenAPI document that `operation.openapi` made."""
    found = [
        _operation(method.upper(), path, operation, description["paths"])
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if not operation["operationId"].endswith(BY_POST)
    ]
    of_keys = [set(each["problems"]) for each in found if not each["is_signed"]]
    common = set.intersection(*of_keys)
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        each["problems"] = [code for code in each["problems"] if code not in common]
        groups.setdefault(each["tag"], []).append(each)
    environment = Environment(
        loader=PackageLoader("dispatcher.api", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["prose"] = _prose
    return environment.get_template("docs.html").render(
        title=f"{description['info']['title']} {description['info']['version']}",
        about=description["info"]["description"],
        needs_key="security" in description,
        first=found[0],
        groups=groups,
        common=common,
        kinds=PROBLEM_TYPES.items(),
        problem=_json({"type": "urn:email-dispatcher:problem:invalid-email", "code": "invalid-email", "status": 422}),
        schemas={name: _json(schema) for name, schema in description["components"]["schemas"].items()},
    )


def _operation(method: str, path: str, operation: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    name, answers, is_signed = operation["operationId"], operation["responses"], operation.get("security") == []
    (status, success), *_ = answers.items()
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    also = [each for each, methods in paths.items() if methods.get("post", {}).get("operationId") == name + BY_POST]
    return {
        "name": name,
        "tag": operation["tags"][0],
        "summary": operation["summary"],
        "description": operation["description"],
        "method": method,
        "path": path,
        "also": also[0] if also else None,
        "is_signed": is_signed,
        "parameters": [{"description": None, "required": False, **each} for each in operation["parameters"]],
        "body": _name_of(body),
        "curl": "" if is_signed else _curl(method, path, operation["parameters"], body.get("example")),
        "python": "" if is_signed else _python(name, path, body.get("example")),
        "status": status,
        "answer": next(map(_name_of, success.get("content", {}).values()), None),
        "headers": {each: {"description": None, **header} for each, header in success.get("headers", {}).items()},
        "problems": list(_codes(answers)),
    }


def _curl(method: str, path: str, parameters: list[Mapping[str, Any]], example: Any) -> str:
    implied = "GET" if example is None else "POST"
    lines = [f'curl "$DISPATCHER_API_URL{path}"' + (f" -X {method}" if method != implied else "")]
    lines.append('-H "Authorization: Bearer $DISPATCHER_API_KEY"')
    if example is not None:
        headers = [(each["name"], each["example"]) for each in parameters if "example" in each]
        lines += [f"-H {shlex.quote(f'{header}: {value}')}" for header, value in headers]
        lines += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(_json(example))}"]
    return " \\\n  ".join(lines)


def _python(name: str, path: str, example: Any) -> str:
    values = example or {}
    if name == "create_email":
        return _SENT.format_map(values)
    if name in _CALLS:
        return _CALLS[name].format_map(values)
    one = name.removesuffix("_email")
    is_decision = one != name  # about one email: the client's own method, which has no tenant
    method = one if is_decision else _methods().get(name.removesuffix("_emails"), name)
    given = [each if is_decision else f"{each}={each}" for each in _IN_PATH.findall(path)]
    named = [
        f"{each}={_value(each, value)}" for each, value in values.items() if each != "tenant_id" or not is_decision
    ]
    return f"client.{method}({', '.join(given + named)})"


def _value(name: str, value: object) -> str:
    return f"datetime.fromisoformat({value!r})" if name == "send_at" else repr(value)


def _methods() -> dict[str, str]:
    """The client's methods that carry out an action, by the operation's name."""
    found = vars(Operations).items()
    return {
        operation_name(each.action): name
        for name, each in found
        if isinstance(each, Method) and each.action is not None
    }


def _codes(answers: Mapping[str, Any]) -> Iterator[str]:
    for answer in answers.values():
        if MEDIA_TYPE in answer.get("content", {}):
            yield from _CODE.findall(answer["description"])


def _name_of(media_type: Mapping[str, Any]) -> str | None:
    return media_type.get("schema", {}).get("$ref", "").rpartition("/")[2] or None


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _prose(text: str) -> Markup:
    """The HTML of a text in which `backticks` mark code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 - the text is escaped
