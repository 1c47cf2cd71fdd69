"""The smtp adapter keeps, reuses and closes connections. The server counts the connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatcher.config.values import SmtpServer
from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Uncertain
from dispatcher.providers.contract import NoFreeConnection
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.transport.smtp_connection import default_ehlo_name
from tests.providers.attempts import FakeAttempt
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, an_email, send
from tests.providers.places import SmtpPlace, sink_process, smtp_place


async def test_emails_reuse_a_connection(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        for _ in range(5):
            await send(place.provider, an_email())

        assert place.sink.connections == 1
        assert place.sink.commands["EHLO"] == 1


async def test_no_more_connections_than_allowed_are_opened(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(latency_seconds=0.01), connections=3) as place:
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(30)))

        assert place.sink.connections == 3
        assert place.sink.ledger().delivered == 30


async def test_a_server_with_fewer_connections_gets_all_emails_over_those(tmp_path: Path) -> None:
    behaviour = SmtpBehaviour(most_sessions=2, latency_seconds=0.01)
    async with smtp_place(tmp_path, behaviour, connections=8) as place:
        first = await send(place.provider, an_email())
        others = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(40)))

        assert all(isinstance(sending.outcome, Accepted) for sending in (first, *others))
        assert place.sink.connections <= 8
        assert place.sink.ledger().delivered == 41


async def test_a_server_that_accepts_every_connection_gets_all_that_are_allowed(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={Step.MAIL: SmtpFault.HANG}), connections=20) as place:
        tasks = [asyncio.create_task(send(place.provider, an_email())) for _ in range(25)]
        await _until(lambda: place.sink.commands["MAIL"] == 20)

        assert place.sink.connections == 20
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_full_server_is_asked_for_few_connections(tmp_path: Path) -> None:
    behaviour = SmtpBehaviour(most_sessions=2, latency_seconds=0.01)
    async with smtp_place(tmp_path, behaviour, connections=100, emails_per_connection=1000) as place:
        await send(place.provider, an_email())
        sendings = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(200)))

        assert all(isinstance(sending.outcome, Accepted) for sending in sendings)
        assert place.sink.connections <= 10


async def test_a_server_that_refuses_every_connection_defers_at_once(tmp_path: Path) -> None:
    behaviour = SmtpBehaviour(script={Step.CONNECT: "421 4.7.0 too many connections"})
    async with smtp_place(tmp_path, behaviour, connections=2) as place:
        sendings = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(10)))

        assert {getattr(sending.outcome, "code", None) for sending in sendings} == {"421 4.7.0"}


@pytest.mark.parametrize("reply", ["432 4.3.2 sender thread limit exceeded", "451 Too many concurrent connections"])
@pytest.mark.parametrize("step", [Step.MAIL, Step.DATA, Step.END])
async def test_a_server_that_complains_about_connections_gets_fewer(step: Step, reply: str, tmp_path: Path) -> None:
    behaviour = SmtpBehaviour(latency_seconds=0.01)
    async with smtp_place(tmp_path, behaviour, connections=4) as place:
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(4)))
        behaviour.script, behaviour.times = {step: reply}, 2
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(4)))

        sendings = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(20)))

        assert all(isinstance(sending.outcome, Accepted) for sending in sendings)
        assert len(place.sink.sessions) == 2


async def test_a_connection_is_replaced_after_its_limit_of_emails(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1, emails_per_connection=10) as place:
        for _ in range(25):
            await send(place.provider, an_email())

        assert place.sink.connections == 3
        await _until(lambda: place.sink.commands["QUIT"] == 2)


async def test_closing_sends_quit(tmp_path: Path) -> None:
    async with smtp_place(tmp_path) as place:
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(4)))
        opened = place.sink.connections

        await place.provider.close()

        await _until(lambda: place.sink.commands["QUIT"] == opened and not place.sink.sessions)


async def test_closing_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={Step.QUIT: SmtpFault.HANG})) as place:
        await send(place.provider, an_email())

        async with asyncio.timeout(PATIENCE_SECONDS):
            await place.provider.close()


async def test_a_dead_idle_connection_is_replaced_within_the_attempt(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())
        place.sink.drop_connections()

        sending = await send(place.provider, an_email())

        assert isinstance(sending.outcome, Accepted)
        assert sending.left == 1
        assert place.sink.connections == 2
        assert place.sink.ledger().delivered == 2


@pytest.mark.parametrize("step", [Step.MAIL, Step.RCPT, Step.DATA])
@pytest.mark.parametrize("what", ["421 4.4.2 idle for too long", SmtpFault.CLOSE, SmtpFault.RESET])
async def test_a_dead_idle_connection_is_replaced_only_once(tmp_path: Path, step: Step, what: str) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())
        place.sink.behaviour.script[step] = what

        sending = await send(place.provider, an_email())

        assert isinstance(sending.outcome, Deferred)
        assert sending.left == 0
        assert place.sink.connections == 2


@pytest.mark.parametrize("step", [Step.RCPT, Step.DATA])
async def test_a_reused_connection_that_hangs_after_a_reply_is_awaited_until_the_deadline(
    tmp_path: Path, step: Step
) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())
        place.sink.behaviour.script[step] = SmtpFault.HANG

        sending = await send(place.provider, an_email(), seconds=LATER_SECONDS)

        assert isinstance(sending.outcome, Deferred)
        assert sending.left == 0
        assert place.sink.connections == 1


async def test_a_hanging_replacement_connection_is_not_replaced_again(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())
        place.sink.behaviour.script[Step.MAIL] = SmtpFault.HANG

        sending = asyncio.create_task(send(place.provider, an_email(), seconds=4 * LATER_SECONDS))
        await _until(lambda: place.sink.connections == 2 and place.sink.commands["MAIL"] == 3)
        place.sink.drop_connections()

        assert isinstance((await sending).outcome, Deferred)
        assert (await sending).left == 0
        assert place.sink.connections == 2


async def test_a_hanging_reused_connection_leaves_time_for_a_new_one(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())
        for session in place.sink.sessions:
            session.freeze()

        sending = await send(place.provider, an_email(), seconds=4 * LATER_SECONDS)

        assert isinstance(sending.outcome, Accepted)
        assert place.sink.connections == 2


async def test_no_reply_after_the_body_is_never_retried(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())
        place.sink.behaviour.script[Step.ANSWER] = SmtpFault.CLOSE
        email = an_email()

        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Uncertain)
        assert place.times()[str(email.email_id)] == 1
        assert place.sink.connections == 1


async def test_a_refused_transaction_is_reset_before_the_next_email(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email(to=("refused@example.com",)))
        email = an_email()

        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Accepted)
        assert place.sink.connections == 1
        assert place.sink.commands["RSET"] == 1
        assert place.sink.received[0].recipients == ("ann@example.com",)


async def test_a_server_that_refuses_rset_gets_a_new_connection(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={Step.RSET: "500 what?"}), connections=1) as place:
        await send(place.provider, an_email(to=("refused@example.com",)))

        sending = await send(place.provider, an_email())

        assert isinstance(sending.outcome, Accepted)
        assert place.sink.connections == 2


async def test_a_connection_that_was_idle_for_long_is_probed(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1, trusted_idle_seconds=0.0) as place:
        await send(place.provider, an_email())
        await send(place.provider, an_email())

        assert place.sink.commands["RSET"] == 1


async def test_a_connection_with_a_surplus_reply_is_not_reused(tmp_path: Path) -> None:
    surplus = SmtpBehaviour(script={Step.ANSWER: "250 2.0.0 Ok\r\n250 2.0.0 Ok"})
    async with smtp_place(tmp_path, surplus, connections=1) as place:
        first = await send(place.provider, an_email())
        place.sink.behaviour.script = {Step.END: "550 5.6.0 no"}
        second = await send(place.provider, an_email())

        assert isinstance(first.outcome, Accepted)
        assert not isinstance(second.outcome, Accepted)
        assert place.sink.connections == 2


async def test_a_wait_without_a_free_connection_does_not_count_against_the_server(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={Step.MAIL: SmtpFault.HANG}), connections=1) as place:
        first = asyncio.create_task(send(place.provider, an_email()))
        await _until(lambda: place.sink.commands["MAIL"] == 1)

        with pytest.raises(NoFreeConnection):
            await send(place.provider, an_email(), seconds=SOON_SECONDS)

        first.cancel()
        await asyncio.wait([first])


async def test_the_deadline_restarts_when_a_connection_is_acquired(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    behaviour = SmtpBehaviour(script={Step.MAIL: SmtpFault.HANG})
    async with smtp_place(tmp_path, behaviour, connections=1) as place:
        first = asyncio.create_task(send(place.provider, an_email()))
        await _until(lambda: place.sink.commands["MAIL"] == 1)
        attempt = FakeAttempt(1, loop.time() + LATER_SECONDS, lambda: None)
        attempt.admission = lambda: loop.time() + PATIENCE_SECONDS
        second = asyncio.create_task(place.provider.send(an_email(), attempt))
        await asyncio.sleep(0)

        behaviour.script.clear()
        first.cancel()

        assert isinstance(await second, Accepted)
        assert attempt.deadline > loop.time() + LATER_SECONDS
        await asyncio.wait([first])


async def test_an_email_refused_in_connection_acquired_frees_its_slot(tmp_path: Path) -> None:
    class RouteClosed(Exception):
        pass

    def refuse() -> float:
        raise RouteClosed

    async with smtp_place(tmp_path, connections=1) as place:
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        with pytest.raises(RouteClosed):
            await place.provider.send(an_email(), FakeAttempt(1, deadline, _must_not_leave, admission=refuse))

        assert isinstance((await send(place.provider, an_email())).outcome, Accepted)


async def test_the_final_dot_is_not_sent_in_the_reserved_time(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(slow_seconds=1.7), connections=1) as place:
        sending = await send(place.provider, an_email(to=("slow@example.com",)), seconds=2.0)

        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is Reason.TIMEOUT_BEFORE_SEND
        assert sending.left == 0
        assert place.sink.ledger().delivered == 0


async def test_a_deadline_that_has_passed_sends_nothing(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())

        outcome = await place.provider.send(
            an_email(), FakeAttempt(1, asyncio.get_running_loop().time() - 1, _must_not_leave)
        )

        assert isinstance(outcome, Deferred)
        assert outcome.reason is Reason.TIMEOUT_BEFORE_SEND
        assert place.sink.ledger().delivered == 1


@pytest.mark.parametrize("step", [Step.CONNECT, Step.EHLO, Step.MAIL, Step.DATA])
async def test_a_cancelled_send_sends_nothing_and_frees_its_slot(tmp_path: Path, step: Step) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={step: SmtpFault.HANG}), connections=1) as place:
        task = asyncio.create_task(send(place.provider, an_email()))
        await _until(lambda: place.sink.connections == 1 and _has_come_to(place, step))

        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        await _until(lambda: not place.sink.sessions)
        place.sink.behaviour.script.clear()
        assert isinstance((await send(place.provider, an_email())).outcome, Accepted)
        assert place.sink.ledger().delivered == 1


async def test_a_reply_that_is_unread_in_the_socket_at_the_deadline_counts(tmp_path: Path) -> None:
    """If the loop is busy until after the deadline, a reply that has arrived but is not read must still count."""
    loop = asyncio.get_running_loop()
    async with sink_process(tmp_path) as port:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "none")))
        await send(provider, an_email())
        deadline = loop.time() + LATER_SECONDS
        email = an_email()

        def stay_busy() -> None:
            _block_until(lambda: str(email.email_id) in read_ledger(tmp_path / "ledger.jsonl").ids)
            # `loop.time()` would not advance here, because uvloop updates its time only once per iteration.
            _block_until(lambda: time.monotonic() > deadline + 0.1)

        outcome = await provider.send(email, FakeAttempt(1, deadline, lambda: _soon(stay_busy)))
        await provider.close()

    assert loop.time() > deadline
    assert isinstance(outcome, Accepted)


def _soon(act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(act)


def _block_until(condition: Callable[[], bool]) -> None:
    """Block the loop like a long computation."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at


def _has_come_to(place: SmtpPlace, step: Step) -> bool:
    return step is Step.CONNECT or place.sink.commands[step.upper()] > 0


def _must_not_leave() -> None:
    pytest.fail("the email left")


async def _until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true; fail after a timeout."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  the condition is the sink's, which has no event for it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("host", "address", "name"),
    [
        ("mx.example.org", "10.0.0.7", "mx.example.org"),
        ("worker-1", "10.0.0.7", "[10.0.0.7]"),
        ("worker-1", "2001:db8::7", "[IPv6:2001:db8::7]"),
    ],
)
def test_ehlo_has_our_host_name_or_our_ip_address(
    host: str, address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)

    assert default_ehlo_name(address) == name
