"""The demo's emails are the same for the same seed, have every expected outcome, and go to reserved domains."""

from __future__ import annotations

import pytest

from dispatcher.dev.demo_emails import ExpectedOutcome, PlannedEmail, plan_emails
from dispatcher.domain.address import parse_address


@pytest.fixture(scope="module")
def planned() -> list[PlannedEmail]:
    """The emails of a demo with the default options."""
    return list(plan_emails(1000, seed=1))


def test_a_seed_gives_the_same_emails_each_with_its_own_key(planned: list[PlannedEmail]) -> None:
    assert list(plan_emails(1000, seed=1)) == planned
    assert list(plan_emails(10, seed=1, first=50)) == planned[50:60]
    assert len({item.email.message_key for item in planned}) == len(planned)


def test_a_small_demo_has_every_expected_outcome_and_a_repeated_email() -> None:
    small = list(plan_emails(6, seed=1))

    assert {item.expected for item in small} == set(ExpectedOutcome)
    assert any(item.is_repeated for item in small)


def test_all_recipients_are_in_reserved_domains(planned: list[PlannedEmail]) -> None:
    texts = {text for item in planned for text in (item.email.sender, *item.email.to, *item.email.cc, *item.email.bcc)}

    assert all(parse_address(text).domain.rpartition(".")[2] in ("example", "com", "org", "net") for text in texts)
    assert all("example" in parse_address(text).domain.split(".") for text in texts)
