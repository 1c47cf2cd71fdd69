"""An email with a header that could control a provider is never sent, whichever host stored the email."""

from __future__ import annotations

from typing import Any, Final

import pytest

from dispatcher.domain.capabilities import Capabilities
from dispatcher.worker.bulk_calls import with_bulk_calls
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedBulk, ScriptedProvider

STORED: Final[dict[str, Any]] = {
    "headers": {"X-Order": "17", "X-MC-Subaccount": "x"},
    "allowed_headers": ["X-MC-Subaccount"],
}
TEMPLATED: Final[dict[str, Any]] = {**STORED, "template_id": "d-1", "text": None}


@pytest.mark.parametrize("fields", [STORED, TEMPLATED], ids=["text", "template"])
async def test_an_email_with_a_forbidden_header_fails_at_once_and_names_the_header(
    bench: Bench, fields: dict[str, Any]
) -> None:
    first, second = (ScriptedProvider(name, Capabilities(copies=1, templates=True)) for name in ("sendgrid", "smtp"))
    await bench.start([first, second])

    await bench.enqueue(1, **fields)

    await bench.settled({"failed": 1})
    assert not first.accepted
    assert not second.accepted
    (attempt,) = bench.books.select("select error_type, error from every_attempt")
    assert attempt["error_type"] == "invalid_content"
    assert attempt["error"].startswith("headers.X-MC-Subaccount controls Mailchimp Transactional")


async def test_an_email_with_a_forbidden_header_is_in_no_bulk_call(bench: Bench) -> None:
    provider = ScriptedBulk("sendgrid", Capabilities(copies=1, templates=True))
    await bench.start([with_bulk_calls(provider, 10)])

    await bench.enqueue(2, **TEMPLATED)

    await bench.settled({"failed": 2})
    assert not provider.accepted


async def test_an_email_with_an_allowed_header_is_sent(bench: Bench) -> None:
    provider = ScriptedProvider("smtp")
    await bench.start([provider], ALLOWED_PROVIDER_HEADERS="x-mc-subaccount")

    (email_id,) = await bench.enqueue(1, **STORED)

    await bench.settled({"sent": 1})
    assert provider.accepted == {email_id: 1}
