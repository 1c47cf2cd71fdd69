"""Workers are killed at every step, also between two transactions of an email: each recipient of a sent email has it,
and nobody gets it twice."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import psycopg

from dispatcher import Email
from tests.acceptance.harness import Host, stop
from tests.providers.choosy_server import ChoosyServer, at_most
from tests.providers.listeners import listening
from tests.steps.kill_points import WORKER_STEPS, KillPlan
from tests.steps.proof import SETTINGS, count_unfinished
from tests.supervisor.program import eventually

KILLS = 20
RECIPIENTS = [f"{name}@example.org" for name in ("ann", "bob", "cem")]


@contextmanager
def running(server: ChoosyServer) -> Iterator[int]:
    """Runs the server in a thread; yields its port."""
    ports: SimpleQueue[int] = SimpleQueue()
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with listening(server.serve) as port:
            ports.put(port)
            await stopping.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        yield ports.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(30)
        loop.close()


def test_kills_between_the_transactions_of_an_email_send_no_recipient_a_duplicate_and_leave_none_out(
    host: Host,
) -> None:
    server = ChoosyServer(rule=at_most(1))
    kill_plan = KillPlan(host.folder, seed=3)
    kill_plan.allow(0, 0)
    argv = [sys.executable, "-m", "tests.steps.program", str(host.folder), "3", "SIGKILL"]
    with running(server) as port:
        url = f"smtp://127.0.0.1:{port}?tls=none"
        run = host.program(argv, "run", env=host.environment(**SETTINGS, PROVIDERS="smtp", SMTP_URL=url))
        kill_plan.allow(KILLS, 0)
        ids = host.enqueue(an_email(number) for number in range(60))

        def all_are_killed() -> bool:
            if count_unfinished(host) < 30:
                ids.update(host.enqueue(an_email(len(ids) + number) for number in range(30)))
            return len(kill_plan.kills()) >= KILLS

        eventually(all_are_killed, "the kills", seconds=120)
        eventually(lambda: count_unfinished(host) == 0, "the end of all emails", seconds=60)
        stop(run)

    assert {kill.step for kill in kill_plan.kills()} >= set(WORKER_STEPS)
    in_doubt = frozenset[object]().union(*(kill.on_the_wire for kill in kill_plan.kills()))
    with psycopg.connect(host.database_url) as connection:
        rows = connection.execute("select email_id, status, recipient_outcomes from dispatcher.email_log").fetchall()
    assert {row[0] for row in rows} == ids
    for email_id, status, outcomes in rows:
        arrived = server.recipients(email_id)
        assert set(arrived.values()) <= {1}, (email_id, status, arrived)
        known = {RECIPIENTS[int(position) - 1] for position in outcomes or {}}
        assert known <= arrived.keys(), (email_id, status, arrived, outcomes)
        if status == "sent":
            assert arrived.keys() == set(RECIPIENTS), (email_id, arrived)
        else:
            assert (status, email_id in in_doubt) == ("held", True)
            assert len(arrived) - len(known) in (0, 1)


def an_email(number: int) -> Email:
    return Email(
        message_key=f"email-{number}", sender="shop@example.com", to=RECIPIENTS, subject="Receipt", text="Thank you."
    )
