"""Tests which provider is chosen for the next attempt, and how outcomes change the choice."""

from __future__ import annotations

import math
from dataclasses import replace
from uuid import uuid4

import pytest

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import (
    CONCERNS_PROVIDER,
    Accepted,
    Concern,
    Deferred,
    Outcome,
    Reason,
    Rejected,
    Uncertain,
)
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.routing.breaker import (
    FAILURES_IN_A_ROW,
    FIRST_OPEN_SECONDS,
    LONGEST_OPEN_SECONDS,
    UNREACHED_IN_A_ROW,
    BreakerState,
    CircuitBreaker,
)
from dispatcher.routing.evidence import Blame
from dispatcher.routing.routes import DELAY_SPREAD, MIN_DELAY_SECONDS, Route, Routes
from tests.providers.emails import an_email
from tests.worker.scripted import ANYTHING, ScriptedProvider

FAILED = Deferred(Reason.CONNECTION_FAILED)
PLAIN = an_email()
TEMPLATED = an_email(template_id="d-1", text=None)
NO_TEMPLATES = Capabilities(copies=1, templates=False)
THROTTLED = Deferred(Reason.THROTTLED, "slow down", "429", 90.0)


class Scene:
    """Routes to the given providers, in the given order, with one clock."""

    def __init__(self, names: str = "abc", **capabilities: Capabilities) -> None:
        self.now = 1000.0
        self.providers = [ScriptedProvider(name, capabilities.get(name, ANYTHING)) for name in names]
        breakers = (CircuitBreaker(lambda: self.now, lambda *_: None, jitter=lambda: 1.0) for _ in names)
        self.by_name = {one.name: Route(one, breaker) for one, breaker in zip(self.providers, breakers, strict=True)}
        self.routes = Routes(list(self.by_name.values()), jitter=lambda: 1.0)

    @staticmethod
    def email() -> OutgoingEmail:
        return an_email(email_id=(number := uuid4()), to=(f"ann@{number.hex}.example",))

    def hear(self, name: str, outcome: Outcome, times: int = 1, *, is_already_counted: bool = False) -> list[Blame]:
        """Tries emails on this provider, each with this outcome; returns whom the breaker blamed."""
        route = self.by_name[name]
        trials = (route.breaker.begin() for _ in range(times))
        return [
            route.record_outcome(outcome, trial, self.email(), is_already_counted=is_already_counted)
            for trial in trials
        ]

    def fault(self, name: str) -> None:
        route = self.by_name[name]
        route.record_fault(ProviderFault(name, "bad credentials"), route.breaker.begin(), self.email())

    def chosen(self, *refused_by: str, email: OutgoingEmail = PLAIN) -> str | None:
        """The provider that is chosen for the next attempt; None if no provider is available."""
        route = self.routes.choose(email, refused_by)
        return route.name if route else None

    def delay_seconds(self, *unable: str) -> float:
        return self.routes.delay_seconds(self.routes.capable(TEMPLATED, unable))

    def half_open(self, name: str) -> None:
        """Reports a fault of the provider, and waits until the provider may be probed."""
        self.fault(name)
        self.now += FIRST_OPEN_SECONDS
        assert self.state(name) is BreakerState.HALF_OPEN

    def limits(self) -> tuple[str | None, int | None, float, float | None]:
        """The chosen provider, the room, and the seconds of the wait and until the next change."""
        return self.chosen(), self.routes.room, self.routes.wait_seconds, self.routes.change_seconds

    def state(self, name: str) -> BreakerState:
        return self.by_name[name].breaker.state


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_first_provider_that_did_not_refuse_is_chosen(scene: Scene) -> None:
    assert scene.limits() == ("a", None, 0.0, None)
    assert [scene.chosen("a"), scene.chosen("a", "b"), scene.chosen("a", "b", "c")] == ["b", "c", None]


def test_a_provider_that_an_operator_paused_is_skipped_until_the_operator_resumes_it() -> None:
    scene = Scene("ab")

    assert scene.routes.pause({"a", "unknown"})
    assert not scene.routes.pause({"a"})
    assert (scene.limits(), scene.chosen("b")) == (("b", None, 0.0, None), None)
    scene.routes.pause({"a", "b"})
    assert (scene.limits(), scene.routes.are_all_paused) == ((None, 0, math.inf, None), True)
    scene.routes.pause(())
    assert (scene.chosen(), scene.routes.paused) == ("a", frozenset())


@pytest.mark.parametrize("reason", sorted(CONCERNS_PROVIDER))
def test_a_provider_that_fails_or_throttles_is_skipped(scene: Scene, reason: Reason) -> None:
    scene.hear("a", Deferred(reason), FAILURES_IN_A_ROW)
    assert scene.chosen() == "b"
    scene.hear("b", THROTTLED)  # one with a time is enough

    assert (scene.chosen(), scene.state("b")) == ("c", BreakerState.PAUSED)


@pytest.mark.parametrize(
    ("asked", "state"), [(LONGEST_OPEN_SECONDS, BreakerState.CLOSED), (600.0, BreakerState.PAUSED)]
)
def test_a_provider_that_names_a_time_is_not_tried_before_it(scene: Scene, asked: float, state: BreakerState) -> None:
    scene.hear("a", Deferred(Reason.SERVER_ERROR, "maintenance", "503", asked))

    assert scene.state("a") is state
    scene.now += asked
    assert scene.state("a") is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("reason", "failures"),
    [
        (Reason.CONNECTION_FAILED, UNREACHED_IN_A_ROW),
        (Reason.TIMEOUT_BEFORE_SEND, UNREACHED_IN_A_ROW),
        (Reason.SERVER_ERROR, FAILURES_IN_A_ROW),
    ],
)
def test_a_provider_that_opens_no_connection_is_soon_paused_and_no_email_is_at_fault(
    scene: Scene, reason: Reason, failures: int
) -> None:
    blames = scene.hear("a", Deferred(reason, known_concern=Concern.PROVIDER), failures)

    assert blames == [Blame.UNKNOWN] * (failures - 1) + [Blame.PROVIDER]
    assert scene.state("a") is BreakerState.OPEN


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Deferred(Reason.CONNECTION_FAILED, "no such host"), "connection_failed: no such host"),
        (Deferred(Reason.SERVER_ERROR, "busy", "421", known_concern=Concern.PROVIDER), "server_error (421): busy"),
        (Deferred(Reason.SERVER_ERROR, "ann.example says no", "451"), "server_error"),
    ],
)
def test_the_reason_of_a_pause_has_the_servers_words_unless_they_are_about_an_email(
    scene: Scene, refusal: Deferred, reason: str
) -> None:
    scene.hear("a", refusal, FAILURES_IN_A_ROW)

    assert scene.by_name["a"].breaker.reason == reason


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Accepted(), BreakerState.CLOSED),
        (Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1"), BreakerState.CLOSED),
        (Deferred(Reason.RECIPIENT_DEFERRED, "greylisted", "451 4.7.1"), BreakerState.CLOSED),
        (Uncertain("no answer"), BreakerState.OPEN),
    ],
    ids=["accepted", "rejected", "deferred", "uncertain"],
)
def test_an_answer_about_an_email_shows_that_the_provider_works(
    scene: Scene, outcome: Outcome, state: BreakerState
) -> None:
    scene.half_open("a")

    scene.hear("a", outcome)

    assert scene.state("a") is state


@pytest.mark.parametrize(
    "outcome",
    [Rejected(Reason.INVALID_CONTENT, "our own rendering"), Deferred(Reason.INTERNAL_ERROR)],
    ids=["rejected", "deferred"],
)
def test_a_refusal_by_the_adapter_says_nothing_about_the_provider(scene: Scene, outcome: Outcome) -> None:
    scene.hear("b", FAILED, FAILURES_IN_A_ROW - 1)
    scene.half_open("a")

    scene.hear("a", outcome)
    scene.hear("b", outcome)
    scene.hear("b", FAILED)

    assert (scene.state("a"), scene.by_name["a"].breaker.room) == (BreakerState.HALF_OPEN, 1)
    assert scene.state("b") is BreakerState.OPEN


def test_without_an_available_provider_nothing_is_leased_until_the_first_may_be_probed(scene: Scene) -> None:
    scene.fault("a")
    scene.hear("b", THROTTLED)
    assert scene.limits() == ("c", None, 0.0, FIRST_OPEN_SECONDS), "there is no limit while one breaker is closed"
    scene.hear("c", THROTTLED)

    assert scene.limits() == (None, 0, FIRST_OPEN_SECONDS, FIRST_OPEN_SECONDS)
    scene.now += FIRST_OPEN_SECONDS

    assert scene.limits() == ("a", 1, 0.0, 90.0 - FIRST_OPEN_SECONDS)


def test_a_failed_bulk_call_counts_once_but_a_missing_answer_counts_for_each_email(scene: Scene) -> None:
    rest = FAILURES_IN_A_ROW * 10

    for outcome, blame in ((Deferred(Reason.SERVER_ERROR), Blame.EMAIL), (FAILED, Blame.UNKNOWN)):
        scene.hear("a", outcome)
        blames = scene.hear("a", outcome, rest, is_already_counted=True)
        assert (set(blames), scene.state("a")) == ({blame}, BreakerState.CLOSED)
    scene.hear("a", Uncertain(), rest, is_already_counted=True)

    assert scene.state("a") is BreakerState.OPEN


def test_a_probe_in_a_bulk_call_allows_another(scene: Scene) -> None:
    scene.half_open("a")
    route = scene.by_name["a"]
    first, second = route.breaker.begin(), route.breaker.begin()
    failed = Deferred(Reason.SERVER_ERROR)

    route.record_outcome(failed, first, scene.email())
    route.record_outcome(failed, second, scene.email(), is_already_counted=True)

    assert (scene.state("a"), route.breaker.room) == (BreakerState.HALF_OPEN, 1)


def test_a_provider_that_cannot_send_the_email_is_not_chosen_and_the_most_copies_need_memory() -> None:
    scene = Scene("ab", a=NO_TEMPLATES, b=replace(ANYTHING, copies=4))

    assert scene.routes.copies == 4
    assert (scene.chosen(), scene.chosen(email=TEMPLATED), scene.chosen("b", email=TEMPLATED)) == ("a", "b", None)


def test_an_email_is_delayed_as_long_as_its_only_provider_is_paused() -> None:
    scene = Scene("ab", b=NO_TEMPLATES)
    scene.fault("a")

    assert (scene.chosen(email=TEMPLATED), scene.routes.room) == (None, None)
    assert scene.delay_seconds() == FIRST_OPEN_SECONDS * (1 + DELAY_SPREAD)
    scene.now += FIRST_OPEN_SECONDS
    scene.by_name["a"].breaker.begin()  # another email probes the provider

    assert scene.chosen(email=TEMPLATED) is None
    assert scene.delay_seconds() == MIN_DELAY_SECONDS * (1 + DELAY_SPREAD)


@pytest.mark.parametrize("is_paused_by_operator", [True, False])
def test_the_delay_of_an_email_is_limited_however_long_its_provider_is_paused(is_paused_by_operator: bool) -> None:
    scene = Scene("ab", b=NO_TEMPLATES)
    if is_paused_by_operator:
        scene.routes.pause({"a"})
    else:
        scene.hear("a", replace(THROTTLED, retry_after=3000.0))

    assert scene.chosen(email=TEMPLATED) is None
    assert scene.delay_seconds() == LONGEST_OPEN_SECONDS * (1 + DELAY_SPREAD)


def test_an_email_that_every_provider_could_send_is_due_at_once() -> None:
    scene = Scene("ab")
    scene.fault("a")
    scene.fault("b")

    assert (scene.routes.room, scene.delay_seconds()) == (0, 0.0)
    assert scene.delay_seconds("b") > 0
