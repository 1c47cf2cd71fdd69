"""The demo's emails are the same for the same seed, and use every kind of field and content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from dispatcher.dev.demo_emails import ExpectedOutcome, PlannedEmail, plan_emails
from dispatcher.domain.address import parse_address
from dispatcher.domain.email import Email

SHAPES: dict[str, Callable[[Email], bool]] = {
    "text alone": lambda email: email.html is None,
    "HTML alone": lambda email: email.text is None,
    "text and HTML": lambda email: bool(email.text and email.html),
    "a line that is a dot": lambda email: "\n.\n" in (email.text or ""),
    "several recipients": lambda email: len(email.to) > 1,
    "cc": lambda email: bool(email.cc),
    "bcc": lambda email: bool(email.bcc),
    "reply-to": lambda email: bool(email.reply_to),
    "headers": lambda email: bool(email.headers),
    "tags": lambda email: bool(email.tags),
    "a subject beyond ASCII": lambda email: not email.subject.isascii(),
    "a name beyond ASCII": lambda email: not parse_address(email.to[0]).display_name.isascii(),
    "a domain beyond ASCII": lambda email: any(not parse_address(text).domain.isascii() for text in email.to),
    "a local part beyond ASCII": lambda email: any(not parse_address(text).local.isascii() for text in email.to),
    "a quoted name": lambda email: email.to[0].startswith('"'),
    "an attachment": lambda email: len(email.attachments) == 1,
    "several attachments": lambda email: len(email.attachments) > 1,
    "a large attachment": lambda email: any(len(file.content) > 100_000 for file in email.attachments),
    "a file name beyond ASCII": lambda email: any(not file.filename.isascii() for file in email.attachments),
}


@pytest.fixture(scope="module")
def planned() -> list[PlannedEmail]:
    """The emails of a demo with the default options."""
    return list(plan_emails(1000, seed=1))


def test_same_seed_gives_the_same_emails(planned: list[PlannedEmail]) -> None:
    assert list(plan_emails(1000, seed=1)) == planned


def test_an_email_does_not_depend_on_the_number_of_emails(planned: list[PlannedEmail]) -> None:
    assert list(plan_emails(10, seed=1, first=50)) == planned[50:60]


def test_another_seed_gives_other_emails(planned: list[PlannedEmail]) -> None:
    others = plan_emails(1000, seed=2)

    assert not {item.email.message_key for item in others} & {item.email.message_key for item in planned}


def test_every_message_key_is_unique(planned: list[PlannedEmail]) -> None:
    assert len({item.email.message_key for item in planned}) == len(planned)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_kind_of_email_occurs(seed: int) -> None:
    emails = [item.email for item in plan_emails(1000, seed)]

    assert [shape for shape, has_it in SHAPES.items() if sum(map(has_it, emails)) < 3] == []


def test_some_emails_are_refused_and_some_are_deferred(planned: list[PlannedEmail]) -> None:
    fates = Counter(item.expected for item in planned)

    assert 10 <= fates[ExpectedOutcome.REFUSED] <= 20
    assert 8 <= fates[ExpectedOutcome.GREYLISTED] <= 20


def test_a_small_demo_has_every_expected_outcome_and_a_repeated_email() -> None:
    small = list(plan_emails(6, seed=1))

    assert {item.expected for item in small} == set(ExpectedOutcome)
    assert any(item.is_repeated for item in small)


def test_a_recipient_with_an_expected_outcome_is_the_only_one_and_in_one_email(planned: list[PlannedEmail]) -> None:
    judged = [item.email for item in planned if item.expected is not ExpectedOutcome.ACCEPTED]

    assert all(len(email.to) == 1 and not email.cc and not email.bcc for email in judged)
    assert len({email.to for email in judged}) == len(judged)


def test_all_recipients_are_in_reserved_domains(planned: list[PlannedEmail]) -> None:
    texts = {text for item in planned for text in (item.email.sender, *item.email.to, *item.email.cc, *item.email.bcc)}

    assert all(parse_address(text).domain.rpartition(".")[2] in ("example", "com", "org", "net") for text in texts)
    assert all("example" in parse_address(text).domain.split(".") for text in texts)
