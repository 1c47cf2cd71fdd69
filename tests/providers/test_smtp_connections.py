"""The smtp adapter keeps, reuses and closes connections. The server counts the connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dispatcher.config.values import SmtpServer
from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.domain.outcome import Accepted, Reason
from dispatcher.providers.contract import NoFreeConnection
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.transport.smtp_connection import default_ehlo_name
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, Sending, an_email, outcome_text, send
from tests.providers.places import SmtpPlace, sink_process, smtp_place
from tests.waiting import until, wait_until


@pytest.fixture
async def used(tmp_path: Path) -> AsyncIterator[SmtpPlace]:
    """An adapter with at most one connection, which has sent one email."""
    async with smtp_place(tmp_path, connections=1) as place:
        assert isinstance((await send(place.provider, an_email())).outcome, Accepted)
        yield place


async def test_a_server_that_accepts_every_connection_gets_all_that_are_allowed_and_no_more(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={Step.MAIL: SmtpFault.HANG}), connections=20) as place:
        tasks = [asyncio.create_task(send(place.provider, an_email())) for _ in range(25)]
        await until(lambda: place.sink.commands["MAIL"] == 20)

        assert place.sink.connections == 20
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_server_with_fewer_connections_gets_all_emails_over_those_and_is_asked_for_few_others(
    tmp_path: Path,
) -> None:
    behaviour = SmtpBehaviour(most_sessions=2, latency_seconds=0.01)
    async with smtp_place(tmp_path, behaviour, connections=100, emails_per_connection=1000) as place:
        await send(place.provider, an_email())
        sendings = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(60)))

        assert all(isinstance(sending.outcome, Accepted) for sending in sendings)
        assert place.sink.connections <= 10
        assert place.sink.ledger().delivered == 61


@pytest.mark.parametrize(
    ("step", "reply"),
    [
        (Step.MAIL, "432 4.3.2 sender thread limit exceeded"),
        (Step.DATA, "451 Too many concurrent connections"),
        (Step.END, "432 4.3.2 sender thread limit exceeded"),
    ],
)
async def test_a_server_that_complains_about_connections_gets_fewer(step: Step, reply: str, tmp_path: Path) -> None:
    behaviour = SmtpBehaviour(latency_seconds=0.01)
    async with smtp_place(tmp_path, behaviour, connections=4) as place:
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(4)))
        behaviour.script, behaviour.times = {step: reply}, 2
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(4)))

        sendings = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(20)))

        assert all(isinstance(sending.outcome, Accepted) for sending in sendings)
        assert len(place.sink.sessions) == 2


@pytest.mark.parametrize(("idle_seconds", "probes"), [(5.0, 0), (0.0, 18)], ids=["trusted", "probed"])
async def test_a_connection_is_reused_probed_after_it_was_idle_and_replaced_after_its_limit_of_emails(
    idle_seconds: float, probes: int, tmp_path: Path
) -> None:
    async with smtp_place(
        tmp_path, connections=1, emails_per_connection=10, trusted_idle_seconds=idle_seconds
    ) as place:
        for _ in range(21):
            await send(place.provider, an_email())

        assert (place.sink.connections, place.sink.commands["EHLO"], place.sink.commands["RSET"]) == (3, 3, probes)
        await until(lambda: place.sink.commands["QUIT"] == 2)


async def test_closing_does_not_wait_for_a_server_that_hangs(used: SmtpPlace) -> None:
    used.sink.behaviour.script[Step.QUIT] = SmtpFault.HANG

    async with asyncio.timeout(PATIENCE_SECONDS):
        await used.provider.close()


async def test_a_dead_idle_connection_is_replaced_within_the_attempt(used: SmtpPlace) -> None:
    used.sink.drop_connections()

    sending = await send(used.provider, an_email())

    assert isinstance(sending.outcome, Accepted)
    assert (sending.left, used.sink.connections, used.sink.ledger().delivered) == (1, 2, 2)


@pytest.mark.parametrize(
    ("step", "what", "outcome", "connections", "arrived"),
    [
        # A dead idle connection is replaced only once.
        *((step, "421 4.4.2 idle", "deferred server_error", 2, 0) for step in (Step.MAIL, Step.RCPT, Step.DATA)),
        *((step, SmtpFault.CLOSE, "deferred connection_failed", 2, 0) for step in (Step.MAIL, Step.RCPT, Step.DATA)),
        # A connection that hangs after a reply is awaited until the deadline.
        *((step, SmtpFault.HANG, "deferred timeout_before_send", 1, 0) for step in (Step.RCPT, Step.DATA)),
        # No reply after the body: the email is never sent again.
        (Step.ANSWER, SmtpFault.CLOSE, "uncertain", 1, 1),
    ],
)
async def test_an_email_on_a_reused_connection_that_breaks_is_sent_at_most_once(
    used: SmtpPlace, step: Step, what: str, outcome: str, connections: int, arrived: int
) -> None:
    used.sink.behaviour.script[step] = what
    email = an_email()

    sending = await send(used.provider, email, seconds=LATER_SECONDS if what is SmtpFault.HANG else PATIENCE_SECONDS)

    assert (outcome_text(sending.outcome), sending.left) == (outcome, arrived)
    assert (used.sink.connections, used.times()[str(email.email_id)]) == (connections, arrived)


async def test_a_hanging_reused_connection_leaves_time_for_a_new_one(used: SmtpPlace) -> None:
    for session in used.sink.sessions:
        session.freeze()

    sending = await send(used.provider, an_email(), seconds=4 * LATER_SECONDS)

    assert isinstance(sending.outcome, Accepted)
    assert used.sink.connections == 2


@pytest.mark.parametrize(("reply", "connections"), [(None, 1), ("500 what?", 2)], ids=["reset", "refused"])
async def test_a_refused_transaction_is_reset_or_its_connection_replaced(
    used: SmtpPlace, reply: str | None, connections: int
) -> None:
    used.sink.behaviour.script |= {Step.RSET: reply} if reply else {}
    await send(used.provider, an_email(to=("refused@example.com",)))

    assert isinstance((await send(used.provider, an_email())).outcome, Accepted)
    assert (used.sink.connections, used.sink.commands["RSET"]) == (connections, 1)
    assert used.sink.received[1].recipients == ("ann@example.com",)


async def test_a_wait_without_a_free_connection_does_not_count_against_the_server(used: SmtpPlace) -> None:
    used.sink.behaviour.script[Step.MAIL] = SmtpFault.HANG
    first = asyncio.create_task(send(used.provider, an_email()))
    await until(lambda: used.sink.commands["MAIL"] == 2)

    with pytest.raises(NoFreeConnection):
        await send(used.provider, an_email(), seconds=SOON_SECONDS)

    first.cancel()
    await asyncio.wait([first])


async def test_the_deadline_restarts_when_a_connection_is_acquired(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    behaviour = SmtpBehaviour(script={Step.MAIL: SmtpFault.HANG})
    async with smtp_place(tmp_path, behaviour, connections=1) as place:
        first = asyncio.create_task(send(place.provider, an_email()))
        await until(lambda: place.sink.commands["MAIL"] == 1)
        attempt = Sending(LATER_SECONDS, admission=lambda: loop.time() + PATIENCE_SECONDS)
        second = asyncio.create_task(place.provider.send(an_email(), attempt))
        await asyncio.sleep(0)

        behaviour.script.clear()
        first.cancel()

        assert isinstance(await second, Accepted)
        assert attempt.deadline > loop.time() + LATER_SECONDS
        await asyncio.wait([first])


async def test_an_email_refused_in_connection_acquired_frees_its_slot(used: SmtpPlace) -> None:
    class RouteClosed(Exception):
        pass

    def refuse() -> float:
        raise RouteClosed

    with pytest.raises(RouteClosed):
        await used.provider.send(an_email(), Sending(leave=pytest.fail, admission=refuse))

    assert isinstance((await send(used.provider, an_email())).outcome, Accepted)


@pytest.mark.parametrize(("slow_seconds", "seconds"), [(1.7, 2.0), (0.0, 0.0)], ids=["reserved time", "after it"])
async def test_nothing_is_sent_at_the_deadline_or_in_the_reserved_time(
    slow_seconds: float, seconds: float, tmp_path: Path
) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(slow_seconds=slow_seconds), connections=1) as place:
        await send(place.provider, an_email())

        sending = await send(place.provider, an_email(to=("slow@example.com",)), seconds=seconds)

        assert (outcome_text(sending.outcome), sending.left) == (f"deferred {Reason.TIMEOUT_BEFORE_SEND}", 0)
        assert place.sink.ledger().delivered == 1


@pytest.mark.parametrize("step", [Step.CONNECT, Step.EHLO, Step.MAIL, Step.DATA])
async def test_a_cancelled_send_sends_nothing_and_frees_its_slot(tmp_path: Path, step: Step) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={step: SmtpFault.HANG}), connections=1) as place:
        task = asyncio.create_task(send(place.provider, an_email()))
        verb = step.upper()
        await until(lambda: place.sink.connections == 1 and (step is Step.CONNECT or place.sink.commands[verb] > 0))

        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        await until(lambda: not place.sink.sessions)
        place.sink.behaviour.script.clear()
        assert isinstance((await send(place.provider, an_email())).outcome, Accepted)
        assert place.sink.ledger().delivered == 1


async def test_a_reply_that_is_unread_in_the_socket_at_the_deadline_counts(tmp_path: Path) -> None:
    """If the loop is busy until after the deadline, a reply that has arrived but is not read must still count."""
    loop = asyncio.get_running_loop()
    async with sink_process(tmp_path) as port:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "none")))
        await send(provider, an_email())
        email, attempt = an_email(), Sending(LATER_SECONDS, lambda: loop.call_soon(stay_busy))

        def stay_busy() -> None:
            wait_until(lambda: str(email.email_id) in read_ledger(tmp_path / "ledger.jsonl").ids)
            # `loop.time()` would not advance here, because uvloop updates its time only once per iteration.
            wait_until(lambda: time.monotonic() > attempt.deadline + 0.1)

        outcome = await provider.send(email, attempt)
        await provider.close()

    assert loop.time() > attempt.deadline
    assert isinstance(outcome, Accepted)


@pytest.mark.parametrize(
    ("host", "address", "name"),
    [
        ("mx.example.org", "10.0.0.7", "mx.example.org"),
        ("worker-1", "10.0.0.7", "[10.0.0.7]"),
        ("worker-1", "2001:db8::7", "[IPv6:2001:db8::7]"),
    ],
)
def test_ehlo_names_our_host_or_ip_address(host: str, address: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)

    assert default_ehlo_name(address) == name


async def test_closing_sends_quit(tmp_path: Path) -> None:
    async with smtp_place(tmp_path) as place:
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(4)))
        opened = place.sink.connections

        await place.provider.close()

        await until(lambda: place.sink.commands["QUIT"] == opened and not place.sink.sessions)
