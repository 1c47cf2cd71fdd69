"""An outcome can be stored, and repeats no secret, whatever text an adapter puts into it."""

from __future__ import annotations

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.scrub import OWN_SECRETS
from dispatcher.store.results import storable


@pytest.mark.parametrize(
    "outcome",
    [
        Deferred(Reason.SERVER_ERROR, "the token tok-12345678 is not valid"),
        Rejected(Reason.REFUSED, "dG9rLTEyMzQ1Njc4 is not valid", "403"),
        Uncertain("no answer for tok-12345678"),
    ],
    ids=str,
)
def test_an_adapter_that_forgets_to_scrub_shows_no_secret(outcome: Outcome) -> None:
    OWN_SECRETS.register("journal", ["tok-12345678"])
    try:
        detail = storable(outcome).detail or ""
    finally:
        OWN_SECRETS.register("journal", ())

    assert "<credential>" in detail
    assert "tok-12345678" not in detail
    assert "dG9rLTEyMzQ1Njc4" not in detail
