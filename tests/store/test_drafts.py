"""The HTTP API's inserts of drafts."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.store.connections import Pool
from dispatcher.store.drafts import DraftStore
from dispatcher.store.enqueueing import draft
from tests.store.books import email

TEMPLATE = {"template_id": "t-1", "text": None, "subject": ""}


@pytest.mark.parametrize(
    ("fields", "closed"),
    [
        ({"text": "x" * 50_000}, 0),
        ({"text": "é" * 50_000}, 1),
        ({**TEMPLATE, "template_data": {"items": "x" * 200_000}}, 1),
    ],
    ids=("small", "other characters", "template data"),
)
async def test_a_session_is_closed_after_a_large_statement(pool: Pool, fields: dict[str, Any], closed: int) -> None:
    store = DraftStore(pool, publish_in_seconds=0.0)

    await store.insert(draft([email(f"key-{number}", **fields) for number in range(25)]))

    assert pool.get_stats().get("returns_bad", 0) == closed
