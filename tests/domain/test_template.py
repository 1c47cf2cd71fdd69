"""Tests emails whose body comes from a provider's template."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.domain.email import Email
from dispatcher.errors import InvalidEmail


def templated(**changes: Any) -> Email:
    """A valid email with a template and the given fields changed."""
    given: dict[str, Any] = {
        "message_key": "k",
        "sender": "a@example.com",
        "to": "b@example.org",
        "template_id": "d-0123456789abcdef",
        "template_data": {"name": "Ann", "lines": [{"price": 1.5, "paid": True, "note": None}]},
    }
    return Email(**{**given, **changes})


def test_a_template_replaces_subject_and_body() -> None:
    email = templated()

    assert (email.subject, email.text, email.html) == ("", None, None)
    assert Email.from_json(email.to_json()) == email


def test_names_in_another_order_are_the_same_payload() -> None:
    one = templated(template_data={"a": 1, "b": {"c": 2, "d": 3}})
    other = templated(template_data={"b": {"d": 3, "c": 2}, "a": 1})

    assert one.payload_hash() == other.payload_hash()


@pytest.mark.parametrize("changes", [{"template_id": "d-other"}, {"template_data": {"name": "Bob"}}])
def test_another_template_or_other_data_is_another_payload(changes: dict[str, Any]) -> None:
    assert templated(**changes).payload_hash() != templated().payload_hash()


def nested(depth: int) -> object:
    """An empty list nested in `depth` lists."""
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("template_id", {"text": "hello"}),
        ("template_id", {"template_id": ""}),
        ("template_id", {"template_id": "a/b"}),
        ("template_data", {"template_id": None, "text": "hello"}),
        ("template_data", {"template_data": ["not", "an", "object"]}),
        ("template_data", {"template_data": {"x": nested(40)}}),
        ("template_data", {"template_data": {"x": nested(100_000)}}),
        ("template_data", {"template_data": {"x": float("nan")}}),
        ("template_data", {"template_data": {"x": 2**60}}),
        ("template_data", {"template_data": {"x": "a\0b"}}),
        ("template_data", {"template_data": {"x": "\ud800"}}),
        ("template_data", {"template_data": {1: "x"}}),
        ("template_data", {"template_data": {"x": object()}}),
        ("template_data", {"template_data": {"x": "y" * 300_000}}),
    ],
)
def test_a_refusal_names_the_field_that_templates_do_not_allow(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidEmail) as refused:
        templated(**changes)

    assert refused.value.field == field


def test_json_without_template_id_needs_a_subject() -> None:
    with pytest.raises(InvalidEmail, match="subject"):
        Email.from_json({"message_key": "k", "from": "a@example.com", "to": "b@example.org", "text": "x"})
