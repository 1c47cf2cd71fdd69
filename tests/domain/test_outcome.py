"""What an outcome says of single recipients, and what it may be about."""

from __future__ import annotations

import pytest

from dispatcher.domain.outcome import Concern, Deferred, Reason, left_out


@pytest.mark.parametrize(
    ("detail", "recipients"),
    [
        (None, None),
        ("250 2.0.0 queued", None),
        ("refused recipients: 2 (550 5.1.1)", "2 (550 5.1.1)"),
        ("refused recipients: 2 (550 5.1.1), 3 (451); 250 2.0.0 queued; thanks", "2 (550 5.1.1), 3 (451)"),
    ],
)
def test_an_acceptance_says_which_recipients_it_left_out(detail: str | None, recipients: str | None) -> None:
    assert left_out(detail) == recipients


@pytest.mark.parametrize(
    ("deferred", "concern"),
    [
        (Deferred(Reason.RECIPIENT_DEFERRED), Concern.EMAIL),
        (Deferred(Reason.SERVER_ERROR), Concern.EITHER),
        (Deferred(Reason.CONNECTION_FAILED), Concern.PROVIDER),
        (Deferred(Reason.CONNECTION_FAILED, known_concern=Concern.EMAIL), Concern.EMAIL),
    ],
)
def test_a_deferral_is_about_what_the_adapter_or_else_its_reason_says(deferred: Deferred, concern: Concern) -> None:
    assert deferred.concern is concern
