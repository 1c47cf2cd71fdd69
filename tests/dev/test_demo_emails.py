"""The demo's emails are the same for the same seed, have every expected outcome, and go to reserved domains."""

from __future__ import annotations

from dispatcher.dev.demo_emails import ExpectedOutcome, plan_emails
from dispatcher.domain.address import parse_address


def test_a_seed_gives_the_same_emails_each_with_its_own_key_to_reserved_domains() -> None:
    planned = list(plan_emails(1000, seed=1))
    texts = {text for item in planned for text in (item.email.sender, *item.email.to, *item.email.cc, *item.email.bcc)}

    assert list(plan_emails(1000, seed=1)) == planned
    assert list(plan_emails(10, seed=1, first=50)) == planned[50:60]
    assert len({item.email.message_key for item in planned}) == len(planned)
    assert all(parse_address(text).domain.rpartition(".")[2] in ("example", "com", "org", "net") for text in texts)
    assert all("example" in parse_address(text).domain.split(".") for text in texts)


def test_a_small_demo_has_every_expected_outcome_and_a_repeated_email() -> None:
    small = list(plan_emails(6, seed=1))

    assert {item.expected for item in small} == set(ExpectedOutcome)
    assert any(item.is_repeated for item in small)
