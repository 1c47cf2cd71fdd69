"""Certificates of SNS: messages that name others do not delay genuine messages, and a proven one outlives a restart."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection
from typing import Final

import pytest

from dispatcher.events.contract import EventsRefused, SourceUnavailable
from dispatcher.events.sns import SnsVerifier
from dispatcher.events.sns_certificates import CONCURRENT_FETCHES, MAX_CERTIFICATES, MAX_WAITING
from dispatcher.store.connections import Pool
from dispatcher.store.statements import Source
from dispatcher.transport.http_response import HttpResponse
from tests.events.requests import CERTIFICATE_URL, TOPIC, Sns, dumped
from tests.waiting import until

SECONDS: Final = 40
"""How many rounds an attack lasts. Each has one genuine message."""
FORGED_PER_SECOND: Final = 240


class Amazon:
    """Amazon SNS, which has the genuine certificate, and answers about others only when the test says so.

    Attributes:
        fetched: How often each URL was requested.
        is_quick: Whether requests are answered at once.
    """

    def __init__(self, sns: Sns) -> None:
        self.sns = sns
        self.is_quick = False
        self.genuine = dumped(sns.message("x"))
        self.fetched: Counter[str] = Counter()
        self._answers = asyncio.Event()

    def verifier(self, source: Source | None = None) -> SnsVerifier:
        """A verifier in a process that has just started."""
        return SnsVerifier([TOPIC], max_age_seconds=0, fetch=self.fetch, source=source)

    async def fetch(self, url: str) -> HttpResponse:
        """Answers a request for a certificate."""
        self.fetched[url] += 1
        if url == CERTIFICATE_URL:
            return HttpResponse(200, {}, self.sns.pem)
        if not self.is_quick:
            await self._answers.wait()
        return HttpResponse(200, {}, self.sns.pem) if "Old" in url else HttpResponse(404, {}, b"")

    def answer(self) -> None:
        """Answers all requests that have come so far."""
        self._answers.set()
        self._answers = asyncio.Event()

    async def answer_all(self, tasks: Collection[asyncio.Task[str]]) -> None:
        """Answers requests until all messages have an outcome."""

        def are_done() -> bool:
            self.answer()
            return all(task.done() for task in tasks)

        await until(are_done)

    def forged(self, name: object) -> bytes:
        """A message with a wrong signature that names another certificate."""
        changed = self.genuine.replace(b'"Message":"x"', b'"Message":"y"')
        assert changed != self.genuine
        return changed.replace(b"0123456789abcdef", str(name).encode())


@pytest.fixture(scope="module")
def sns() -> Sns:
    """SNS, whose key is made once."""
    return Sns()


@pytest.fixture
async def amazon(sns: Sns) -> AsyncIterator[Amazon]:
    """Amazon without earlier requests. Answers all requests at the end."""
    amazon = Amazon(sns)
    yield amazon
    amazon.is_quick = True
    amazon.answer()
    await until(lambda: not [task for task in asyncio.all_tasks() if "Certificates" in repr(task.get_coro())])


async def outcome(verifier: SnsVerifier, message: bytes) -> str:
    """What becomes of a message. `later`: its sender must retry."""
    try:
        await verifier.verify(message)
    except EventsRefused:
        return "refused"
    except SourceUnavailable:
        return "later"
    return "accepted"


@pytest.mark.parametrize("repeats", [1, 2])
async def test_genuine_messages_are_accepted_beside_forged_ones_when_the_certificate_is_new(
    amazon: Amazon, repeats: int
) -> None:
    verifier, tasks, genuine = amazon.verifier(), [], []
    for second in range(SECONDS):
        forged = [amazon.forged(f"{second}x{number // repeats}") for number in range(FORGED_PER_SECOND)]
        tasks += [asyncio.create_task(outcome(verifier, message)) for message in forged]
        await asyncio.wait(tasks, timeout=0)
        genuine.append(await asyncio.create_task(outcome(verifier, amazon.genuine)))
        amazon.answer()
    await amazon.answer_all(tasks)

    assert Counter(genuine)["accepted"] >= 0.9 * SECONDS
    assert amazon.fetched[CERTIFICATE_URL] == 1
    assert {task.result() for task in tasks} <= {"later", "refused"}


async def test_a_proven_certificate_needs_no_fetch_after_a_restart(amazon: Amazon, pool: Pool) -> None:
    assert await outcome(amazon.verifier(pool), amazon.genuine) == "accepted"
    restarted = amazon.verifier(pool)
    await restarted.certificates.load()
    tasks = [
        asyncio.create_task(outcome(restarted, amazon.forged(f"x{number}"))) for number in range(FORGED_PER_SECOND)
    ]
    await asyncio.wait(tasks, timeout=0)

    assert [await outcome(restarted, amazon.genuine) for _ in range(SECONDS)] == ["accepted"] * SECONDS
    assert amazon.fetched[CERTIFICATE_URL] == 1
    await amazon.answer_all(tasks)


async def test_only_a_certificate_that_has_verified_a_message_is_stored(amazon: Amazon, pool: Pool) -> None:
    verifier = amazon.verifier(pool)
    tasks = [asyncio.create_task(outcome(verifier, amazon.forged("Old")))]
    await amazon.answer_all(tasks)

    async with pool.connection() as connection:
        stored = await (await connection.execute("select url from dispatcher.sns_certificate")).fetchall()
    assert (tasks[0].result(), stored) == ("refused", [])


async def test_certificates_that_have_verified_no_message_do_not_replace_a_proven_one(amazon: Amazon) -> None:
    verifier = amazon.verifier()
    assert await outcome(verifier, amazon.genuine) == "accepted"
    for number in range(2 * MAX_CERTIFICATES):
        task = asyncio.create_task(outcome(verifier, amazon.forged(f"Old{number}")))
        await amazon.answer_all([task])

    assert await outcome(verifier, amazon.genuine) == "accepted"
    assert (len(amazon.fetched), amazon.fetched[CERTIFICATE_URL]) == (2 * MAX_CERTIFICATES + 1, 1)


async def test_a_certificate_that_does_not_exist_is_fetched_once(amazon: Amazon) -> None:
    verifier, message = amazon.verifier(), amazon.forged("x")
    first = asyncio.create_task(outcome(verifier, message))
    await amazon.answer_all([first])

    assert {await outcome(verifier, message) for _ in range(10)} == {"refused"}
    assert amazon.fetched.total() == 1


async def test_a_certificate_that_cannot_be_fetched_delays_no_other_one(sns: Sns, amazon: Amazon) -> None:
    sns.fetched, sns.status = [], 500
    verifier = SnsVerifier([TOPIC], max_age_seconds=0, fetch=sns.fetch)
    try:
        failing = [await outcome(verifier, amazon.forged("x")) for _ in range(10)]
        fetched = len(sns.fetched)
    finally:
        sns.status = 200

    assert (failing, fetched) == (["later"] * 10, 1)
    assert await outcome(verifier, amazon.genuine) == "accepted"


async def test_few_messages_wait_for_fetches_and_few_fetches_run_at_the_same_time(amazon: Amazon) -> None:
    verifier = amazon.verifier()
    same = [asyncio.create_task(outcome(verifier, amazon.forged("x"))) for _ in range(2 * MAX_WAITING)]
    await until(lambda: sum(task.done() for task in same) == MAX_WAITING)
    names = [amazon.forged(f"x{number // 3}") for number in range(3 * FORGED_PER_SECOND)]
    others = [asyncio.create_task(outcome(verifier, message)) for message in names]
    await until(lambda: sum(task.done() for task in others) > len(others) - MAX_WAITING)

    assert amazon.fetched.total() == CONCURRENT_FETCHES
    await amazon.answer_all(same + others)
