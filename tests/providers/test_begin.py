"""An adapter begins an attempt without a task if a connection is idle, with the same certainty as `send`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import pytest

from dispatcher.dev.http_behaviour import Fault
from dispatcher.domain.outcome import Accepted, Outcome, Uncertain
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.contract import PromptProvider, SendAgain
from tests.providers.emails import PATIENCE_SECONDS, SOON_SECONDS, Sending, an_email
from tests.providers.http_places import sendgrid_place
from tests.providers.ses_place import Ses, accepted, provider_for, ses_place
from tests.waiting import until

PLACES: Final[dict[str, Callable[[Path], AbstractAsyncContextManager[Any]]]] = {
    "sendgrid": sendgrid_place,  # resend and twilio inherit the same code
    "ses": ses_place,
}


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """An adapter with a double. The adapter has sent one email, so one connection is idle."""
    async with PLACES[request.param](tmp_path) as opened:
        assert isinstance(opened.provider, PromptProvider)
        await accepted(opened.provider)
        yield opened


class Begun:
    """An attempt that the adapter has begun; `outcome` is None if the adapter needs `send`."""

    def __init__(self, provider: PromptProvider, seconds: float = PATIENCE_SECONDS, **changes: Any) -> None:
        attempt = Sending(seconds)
        self.outcome: asyncio.Future[Outcome] | None = provider.begin(an_email(**changes), attempt)
        self.left = attempt.left

    async def end(self) -> Outcome:
        assert self.outcome is not None
        return await self.outcome


async def test_an_attempt_begins_on_an_idle_connection_and_leaves_it_idle(place: Any) -> None:
    for sent in (2, 3):
        begun = Begun(place.provider)

        assert begun.left == 1
        assert isinstance(await begun.end(), Accepted)
        assert place.times().total() == sent


async def test_without_an_idle_connection_nothing_is_sent(place: Any) -> None:
    on_the_only_connection = Begun(place.provider)

    waiting = Begun(place.provider)

    assert (waiting.outcome, waiting.left) == (None, 0)
    await on_the_only_connection.end()
    assert place.times().total() == 2


async def test_an_email_with_an_attachment_is_left_to_send(place: Any) -> None:
    file = OutgoingAttachment("a.txt", "text/plain", b"words")

    begun = Begun(place.provider, attachments=(file,))

    assert (begun.outcome, begun.left) == (None, 0)


async def test_a_connection_that_breaks_before_the_answer_leaves_an_unknown_outcome(place: Any) -> None:
    place.double.behaviour.fault, place.double.behaviour.times = Fault.CLOSE, 1
    begun = Begun(place.provider)

    assert isinstance(await begun.end(), Uncertain)
    assert Begun(place.provider).outcome is None, "the broken connection was used again"
    await accepted(place.provider)


@pytest.mark.parametrize("closes", [False, True], ids=["deadline", "close"])
async def test_without_an_answer_an_attempt_ends_at_the_deadline_or_with_its_adapter(place: Any, closes: bool) -> None:
    place.double.behaviour.latency_seconds = 2 * PATIENCE_SECONDS
    begun = Begun(place.provider, PATIENCE_SECONDS if closes else SOON_SECONDS)
    if closes:
        await place.provider.close()

    end = await begun.end()

    assert isinstance(end, Uncertain) if closes else end == Uncertain("no response before the deadline")


async def test_a_lease_that_has_ended_stops_the_attempt_before_its_first_byte(place: Any) -> None:
    def refuse() -> None:
        raise PermissionError

    with pytest.raises(PermissionError):
        place.provider.begin(an_email(), Sending(leave=refuse))

    await Begun(place.provider).end()
    assert place.times().total() == 2


async def test_ses_asks_for_another_attempt_if_aws_refuses_the_credentials() -> None:
    ses = Ses()
    async with provider_for(ses) as provider:
        await accepted(provider)
        ses.ended = set(ses.signers)
        with pytest.raises(SendAgain):
            await Begun(provider).end()
        await until(lambda: len(ses.signers) == 2)
