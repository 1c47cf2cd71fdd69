"""The OpenAPI document is complete: it describes every response to the requests that Schemathesis generates."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import psycopg
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from dispatcher.api.enqueue_endpoints import SCHEMAS
from dispatcher.api.operation import BY_POST
from dispatcher.client import Client
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email import Email
from dispatcher.errors import InvalidEmail
from tests.api.running_api import EMAIL, Api, make_key
from tests.api.test_hostile_requests import FILE, REFUSED

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
async def test_every_response_is_in_the_openapi_document(api: Api, connection: psycopg.Connection) -> None:
    keys = (make_key(connection, scopes=[*Scope]), make_key(connection, scopes=["read"]))

    await asyncio.to_thread(probe, api.url, *keys)


def probe(url: str, key_of_everything: str, key_of_a_reader: str) -> None:
    every, reading = ({"Authorization": f"Bearer {key}"} for key in (key_of_everything, key_of_a_reader))
    callers = itertools.cycle([every, reading, every, {}])
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        assert isinstance(result, Ok)
        valid, invalid = (result.ok().as_strategy(generation_mode=mode) for mode in GenerationMode)

        @hypothesis_settings(max_examples=4, database=None, suppress_health_check=list(HealthCheck))
        @given(case=valid | invalid)
        def ask(case: Any) -> None:
            case.validate_response(case.call(headers=next(callers)), checks=CHECKS)

        ask()


async def test_an_unknown_parameter_and_a_creation_are_in_the_openapi_document(api: Api) -> None:
    """The generated requests contain these only by chance."""
    paths = (await api.get("/openapi.json")).json["paths"]
    for path, operations in paths.items():
        for method in operations.keys() & {"get", "post", "put", "delete"}:
            address = re.sub(r"{[^}]*}", "0199c0de-0000-7000-8000-000000000000", path)
            answer = await api.call(method.upper(), f"{address}?unknown=1")
            assert str(answer.status) in operations[method]["responses"], (method, path, answer.status)

    webhook = {"url": "https://shop.example.com/hooks", "reason": "test"}
    made = await api.call("POST", "/v1/webhooks", body=webhook)
    assert str(made.status) in paths["/v1/webhooks"]["post"]["responses"], made.body


ODD_VALUES: tuple[Any, ...] = (17, "", [], {}, [17], True)


def corpus() -> Iterator[dict[str, Any]]:
    yield EMAIL
    yield from (EMAIL | fields for fields, _, _ in REFUSED.values())
    yield from ({name: value for name, value in EMAIL.items() if name != missing} for missing in EMAIL)
    more: list[dict[str, Any]] = [
        *({name: None} for name in SCHEMAS["Email"]["properties"]),
        *({name: value} for name in SCHEMAS["Email"]["properties"] for value in ODD_VALUES),
        {"to": "Ann <ann@example.org>", "cc": ["b@example.org"], "bcc": "c@example.org"},
        {"tags": ["a", "a"]},
        {"tags": ["a"] * 11},
        {"attachments": [FILE]},
        {"template_id": "d-1", "text": None, "subject": None, "template_data": {"a": [1, None, {"b": 2.5}]}},
        {"on_uncertain": "resend", "correlation_id": "c", "headers": {"X-A": "b"}},
        {"send_at": "2026-11-21T10:00:00Z", "expires_at": "2026-11-21T10:00:00.5+05:30", "lane": "bulk_2"},
        {"subject": "x" * 999},
        {"message_key": "k" * 256},
    ]
    yield from (EMAIL | fields for fields in more)


def test_the_schema_accepts_every_email_that_the_domain_accepts() -> None:
    components = {"components": {"schemas": SCHEMAS}}
    schema = jsonschema.Draft202012Validator({"$ref": "#/components/schemas/KeyedEmail", **components})
    accepted = 0
    for fields in corpus():
        document = {"message_key": "k", **fields}
        try:
            Email.from_json(document)
        except InvalidEmail:
            continue
        accepted += 1
        assert schema.is_valid(document), document
    assert accepted > 20


async def test_the_documentation_shows_each_operation_with_a_call_that_the_client_has(api: Api) -> None:
    answer, document = await api.get("/docs"), (await api.get("/openapi.json")).json
    page = answer.body.decode()

    assert "/test&#34; -X POST" in page  # without a body, curl would send GET
    calls = re.findall(r"client\.(\w+)\(", page)
    operations = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    shown = [each for each in operations if not each.endswith(BY_POST)]
    assert [each for each in calls if not hasattr(Client, each)] == []
    assert [each for each in shown if f'<section id="{each}">' not in page] == []
    assert len(calls) >= len(shown)
    found = [one for methods in document["paths"].values() for one in methods.values()]
    given = [each for one in found for each in one.get("parameters", ())]
    assert [each["name"] for each in given if not each.get("description")] == []
    again = await api.get("/docs", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
