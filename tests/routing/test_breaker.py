"""The circuit breaker opens, pauses and closes, by a clock that the test moves. Some refusals count against the
provider, and some only against the email."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.provider_text import SENDER
from dispatcher.routing.breaker import (
    DEFAULT_PAUSE_SECONDS,
    FAILURES_IN_A_ROW,
    FIRST_OPEN_SECONDS,
    LONGEST_OPEN_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PROBES,
    SUSPECT_SECONDS,
    THROTTLED_IN_A_ROW,
    UNCLEAR_SECONDS,
    UNCLEAR_TRIES,
    UNREACHED_IN_A_ROW,
    BreakerState,
    CircuitBreaker,
)
from dispatcher.routing.evidence import ALIKE_FACTOR, MAX_REMEMBERED, Blame, SuspectEmails

LETTERS = {Blame.EMAIL: "E", Blame.PROVIDER: "P", Blame.UNKNOWN: "?"}


def email(domain: str = "", sender: str = "shop@example.com") -> OutgoingEmail:
    email_id = uuid4()
    address = f"Ann <ann@{domain or f'{email_id.hex}.example'}>"
    return OutgoingEmail(email_id, datetime.now(UTC), sender, (address,), "Hello", "Hi")


@dataclass
class Scene:
    """A circuit breaker, its clock, and the state changes that it reported."""

    now: float = 1000.0
    window: int = 1
    told: list[tuple[BreakerState, str | None]] = field(default_factory=list)
    blames: str = ""
    breaker: CircuitBreaker = field(init=False)
    _emails: dict[str, OutgoingEmail] = field(default_factory=dict)
    _trials: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.breaker = CircuitBreaker(
            lambda: self.now,
            lambda state, reason, _: self.told.append((state, reason)),
            window=self.window,
            jitter=lambda: 1.0,
        )

    def play(self, script: str) -> str:
        """Takes the steps of a script; returns whom the breaker blamed for each refused email.

        A step is a verb, and perhaps an email, a time in seconds and a trial: `8*fail` (eight failures before the
        provider saw an email), `reject a` (twice the same email), `fail new` (an email to a new domain),
        `fail new@bad.example`, `throttle 90`, `begin t1`, `ok t1` (the end of this trial).
        """
        self.blames = ""
        for step in filter(None, script.split(", ")):
            times, _, words = step.rpartition("*")
            for _ in range(int(times or 1)):
                self._step(*words.split())
        return self.blames

    def _step(self, verb: str, *words: str) -> None:
        seconds = next((float(word) for word in words if word[0].isdigit() or word == "inf"), None)
        match verb:
            case "begin":
                self._trials[words[0]] = self.breaker.begin()
            case "resume":
                self.breaker.resume()
            case "wait":
                self.now += self.breaker.wait_seconds
            case "sleep":
                self.now += seconds or 0.0
            case _:
                trial = next((self._trials.pop(word) for word in words if word in self._trials), None)
                about = next((self._named(word) for word in words if word[0] in "abcdefghn"), None)
                blame = self._end(verb, self.breaker.begin() if trial is None else trial, about, seconds)
                self.blames += LETTERS[blame] if about and blame else ""

    def _end(self, verb: str, trial: int, about: OutgoingEmail | None, seconds: float | None) -> Blame | None:
        breaker = self.breaker
        ends: dict[str, Callable[[], Blame | None]] = {
            "ok": lambda: breaker.succeed(trial),
            "abandon": lambda: breaker.abandon(trial),
            "silent": lambda: breaker.time_out(trial, "outcome_unknown"),
            "fail": lambda: breaker.fail(trial, "server_error", about),
            "refuse": lambda: breaker.fail(trial, "server_error", about, by_recipient=True),
            "lost": lambda: breaker.fail(trial, "connection_failed", in_a_row=UNREACHED_IN_A_ROW),
            "fault": lambda: breaker.open(trial, "bad credentials", about),
            "throttle": lambda: breaker.pause(trial, seconds, "throttled", about),
            "reject": lambda: self._refuse(trial, about, seconds=seconds),
            "reject-known": lambda: self._refuse(trial, about, in_a_row=3, gives_up=False),
        }
        return ends[verb]()

    def _refuse(self, trial: int, about: OutgoingEmail | None, **given: Any) -> Blame:
        assert about is not None
        usual = {"in_a_row": FAILURES_IN_A_ROW, "by_sender": False, "seconds": None, "gives_up": True}
        return self.breaker.refuse(trial, "refused", about, **{**usual, **given})

    def _named(self, name: str) -> OutgoingEmail:
        """The email with this name; `new` and `new@…` are always another."""
        kind, _, domain = name.partition("@")
        return email(domain) if kind == "new" else self._emails.setdefault(name, email())

    def reject(self, refused: OutgoingEmail, **given: Any) -> Blame:
        return self._refuse(self.breaker.begin(), refused, **given)

    @property
    def end(self) -> str:
        return f"{self.breaker.state} {self.breaker.room} {self.breaker.wait_seconds:g}"


@pytest.fixture
def scene() -> Scene:
    return Scene()


def each(step: str, names: str) -> str:
    return ", ".join(f"{step} {name}" for name in names)


TRIALS = [f"t{number}" for number in range(100)]
BEGIN_ALL, FAIL_ALL = (", ".join(f"{verb} {trial}" for trial in TRIALS) for verb in ("begin", "fail"))
OPENED, CLOSED = "8*fail", "closed None 0"
ROUNDS = ", ".join(["wait, fail"] * 10)
STATES = {
    "new": ("", CLOSED),
    "an answer resets the count": ("7*fail, ok, 7*fail", CLOSED),
    "its time is over": (f"{OPENED}, wait", "half_open 1 0"),
    "a probe": (f"{OPENED}, wait, begin t0", "half_open 0 0"),
    "a successful probe": (f"{OPENED}, wait, begin t0, ok t0", CLOSED),
    "two failed probes": (f"{OPENED}, wait, fail, wait, fail", "open 0 8"),
    "many failed probes": (f"{OPENED}, {ROUNDS}", "open 0 60"),
    "a probe without an answer": (f"{OPENED}, wait, begin t0, abandon t0", "half_open 1 0"),
    "older trials decide no probe": (
        f"{BEGIN_ALL}, {OPENED}, wait, begin probe, fail t0, silent t1, fault t2, abandon t3",
        "half_open 0 0",
    ),
    "the last trial before": ("7*fail, begin t0, begin t1, fail t0, wait, fail t1", "half_open 1 0"),
    "older failures after a probe": (f"{BEGIN_ALL}, {OPENED}, wait, ok, {FAIL_ALL}", CLOSED),
    "an older success is an answer": (f"begin t0, {OPENED}, wait, ok t0", CLOSED),
    "a missing answer is no failure": ("7*fail, silent", CLOSED),
    "a missing answer resets no count": ("7*fail, silent, fail", "open 0 2"),
    "a missing answer passes no probe": (f"{OPENED}, wait, silent", "open 0 4"),
    "an answer ends a silence": ("7*silent, ok, silent", CLOSED),
    "a pause ends a silence": ("7*silent, throttle 90, wait, silent", CLOSED),
    "a fault": ("fault", "open 0 2"),
    "throttled for a time": ("throttle 90", "paused 0 90"),
    "the time is over": ("throttle 90, wait", CLOSED),
    "throttled again and again": ("throttle, wait, throttle, wait, throttle", "paused 0 4"),
    "throttled after an answer": ("throttle, wait, throttle, wait, ok, throttle", "paused 0 1"),
    "the longest pause counts": ("throttle 5, throttle 60, throttle 1", "paused 0 60"),
    "a very long pause": ("throttle 1e12", f"paused 0 {LONGEST_PAUSE_SECONDS:g}"),
    "an endless pause": ("throttle inf", f"paused 0 {LONGEST_PAUSE_SECONDS:g}"),
    "failures while paused": (f"{BEGIN_ALL}, throttle 300, {FAIL_ALL}", "open 0 300"),
    "a resume makes the next wait short": (f"{OPENED}, {ROUNDS}, resume, fail", "open 0 2"),
}


@pytest.mark.parametrize(("script", "end"), STATES.values(), ids=STATES)
def test_the_breaker_follows_the_answers(scene: Scene, script: str, end: str) -> None:
    scene.play(script)

    assert scene.end == end


REFUSE_7, REJECT_8 = each("refuse", "abcdefg"), each("reject", "abcdefgh")
BLAMES = {
    "several domains": ("8*fail new", "EEEEEEEP", "open 0 2"),
    "one email": ("1000*fail a", "E" * 1000, CLOSED),
    "a single domain": (f"{8 * ALIKE_FACTOR}*fail new@bad.example", "E" * (8 * ALIKE_FACTOR - 1) + "P", "open 0 2"),
    "one mailbox": ("1000*refuse new@bad.example", "E" * 1000, CLOSED),
    "recipients before a success": (f"{REFUSE_7}, ok, {REFUSE_7}, refuse new", "E" * 15, CLOSED),
    "a recipient of a server that is back": ("8*lost, wait, refuse new", "E", CLOSED),
    "every recipient": ("8*refuse new, wait, refuse new", "EEEEEEEPP", "half_open 1 0"),
    "several failed probes": (f"8*fail new, wait, {PROBES}*fail new", "EEEEEEEPPPP", "open 0 4"),
    "a suspect probes": ("7*fail new, fail a, wait, sleep 1, fail a, wait, sleep 1, fail a", "EEEEEEEPPP", "open 0 2"),
    "throttling of several": (f"{THROTTLED_IN_A_ROW}*throttle new", "?P", f"paused 0 {DEFAULT_PAUSE_SECONDS:g}"),
    "throttling of one": ("2*throttle a", "??", CLOSED),
    "throttling with a time": ("throttle new 30", "P", "paused 0 30"),
    "throttling with the shortest time": (f"throttle new {DEFAULT_PAUSE_SECONDS:g}", "P", "paused 0 1"),
    "throttled with a time again": ("throttle a 30, wait, throttle a 30", "P?", CLOSED),
    "throttled after a success": ("throttle a 30, wait, ok, throttle a 30", "PE", CLOSED),
    "a fault that one email meets": ("fault a, wait, ok, fault a", "PE", CLOSED),
    "a fault that every email meets": ("fault a, wait, fault a, wait, fault a", "PPP", "open 0 8"),
    "rejections of several": ("8*reject new", "???????P", "open 0 2"),
    "three rejected again": (", ".join([each("reject", "abc")] * 2) + ", reject a, reject b", "???????P", "open 0 2"),
    "a verdict begins its time anew": (f"{REJECT_8}, sleep {UNCLEAR_SECONDS}, ok, reject a", "???????P?", CLOSED),
    "a throttling does not begin its time": (f"throttle a, sleep {UNCLEAR_SECONDS}, reject a", "??", CLOSED),
    "known words": (f"10*reject-known a, sleep {UNCLEAR_SECONDS}, reject-known a", "?" * 11, CLOSED),
    "rejected after a success": ("reject a, ok, reject a", "?E", CLOSED),
    "a success of an earlier trial": ("begin t0, reject a, ok t0, reject a", "??", CLOSED),
    "a chance after the provider's fault": (f"{REJECT_8}, wait, ok, reject a, ok, reject a", "???????P?E", CLOSED),
    "rejected probes": (f"8*fail new, wait, {PROBES}*reject new", "EEEEEEEPPPP", "open 0 4"),
    "an accepted probe": (f"8*fail new, wait, {PROBES}*reject new, wait, ok", "EEEEEEEPPPP", CLOSED),
    "a quota of a day": ("8*reject new 86400", "???????P", f"open 0 {LONGEST_PAUSE_SECONDS:g}"),
}


@pytest.mark.parametrize(("script", "blames", "end"), BLAMES.values(), ids=BLAMES)
def test_a_refusal_is_blamed_on_the_provider_or_on_the_email(scene: Scene, script: str, blames: str, end: str) -> None:
    assert (scene.play(script), scene.end) == (blames, end)


@pytest.mark.parametrize("seconds", [2.005, 2.015])
def test_wait_seconds_is_zero_only_after_the_change_was_reported(seconds: float) -> None:
    """A caller that gets neither a report nor a wait time would wait for ever. This is tested while the clock moves
    between any two calls."""
    clock = itertools.count(1000.0, 0.01)
    told: list[BreakerState] = []
    breaker = CircuitBreaker(lambda: next(clock), lambda state, _reason, _seconds: told.append(state))
    breaker.pause(breaker.begin(), seconds, "throttled")

    while breaker.wait_seconds:
        assert told == [BreakerState.PAUSED]

    assert told == [BreakerState.PAUSED, BreakerState.CLOSED]


def test_while_half_open_only_the_probe_may_proceed(scene: Scene) -> None:
    slow = scene.breaker.begin()
    assert scene.breaker.may_proceed(slow)
    scene.play(f"{OPENED}, wait")

    probe = scene.breaker.begin()

    assert (scene.breaker.may_proceed(probe), scene.breaker.may_proceed(slow)) == (True, False)


@pytest.mark.parametrize(("window", "silences"), [(1, FAILURES_IN_A_ROW), (256, 256)])
def test_a_whole_window_without_answers_opens_the_breaker(window: int, silences: int) -> None:
    scene = Scene(window=window)
    scene.play(f"{silences - 1}*silent")
    assert scene.told == []

    scene.play("silent")

    assert scene.told == [(BreakerState.OPEN, "outcome_unknown")]


@pytest.mark.parametrize("asked", [-5.0, float("nan")])
def test_an_impossible_time_counts_as_none(scene: Scene, asked: float) -> None:
    scene.breaker.pause(scene.breaker.begin(), asked, "throttled")

    assert scene.breaker.wait_seconds == DEFAULT_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("", BreakerState.CLOSED),
        ("throttle 600", BreakerState.CLOSED),
        (OPENED, BreakerState.HALF_OPEN),
        (f"{OPENED}, throttle 600", BreakerState.HALF_OPEN),
        (f"{OPENED}, wait", BreakerState.HALF_OPEN),
    ],
)
def test_an_operators_resume_ends_every_wait_at_once(scene: Scene, script: str, state: BreakerState) -> None:
    scene.play(script)
    before, scene.told = scene.breaker.state, []

    scene.play("resume")

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (state, 0)
    assert [told for told, _ in scene.told] == ([] if state is before else [state])


def test_a_refused_email_and_emails_to_a_refused_domain_wait_while_others_may_probe(scene: Scene) -> None:
    last = email("bad.example")
    while scene.breaker.fail(scene.breaker.begin(), "server_error", last := email("bad.example")) is Blame.EMAIL:
        pass
    scene.play("wait")

    assert [scene.breaker.admits(other) for other in (last, email("bad.example"), email())] == [False, False, True]
    assert scene.breaker.suspect_wait_seconds(last) == SUSPECT_SECONDS
    scene.now += SUSPECT_SECONDS
    assert scene.breaker.admits(last)


def test_a_single_throttled_email_waits_for_longer_each_time(scene: Scene) -> None:
    lone, waits = email(), []
    for _ in range(10):
        scene.breaker.pause(scene.breaker.begin(), None, "throttled", lone)
        waits.append(scene.breaker.single_email_wait_seconds(lone))

    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == waits[-2] == 64.0


def test_a_lone_rejected_email_fails_after_five_minutes_and_a_dozen_tries(scene: Scene) -> None:
    lone = email()
    began_at, tries = scene.now, 1

    while scene.reject(lone) is Blame.UNKNOWN:
        scene.now += scene.breaker.single_email_wait_seconds(lone)
        tries += 1

    assert UNCLEAR_SECONDS <= scene.now - began_at < UNCLEAR_SECONDS + LONGEST_OPEN_SECONDS + 5
    assert tries <= 12
    assert scene.breaker.state is BreakerState.CLOSED


def test_bad_emails_that_stopped_the_provider_together_fail_at_last(scene: Scene) -> None:
    bad = [email() for _ in range(3)]
    failed: set[int] = set()

    for _ in range(UNCLEAR_TRIES):
        failed |= {number for number in range(3) if scene.reject(bad[number]) is Blame.EMAIL}
        scene.play("wait, ok")

    assert failed == {0, 1, 2}


def test_a_provider_that_rejects_every_probe_stays_open_for_longer_and_no_email_fails(scene: Scene) -> None:
    backlog = [email(f"shop{number % 3}.example") for number in range(100)]
    waits = []
    for round_ in range(200):
        assert scene.reject(backlog[round_ % 100]) is not Blame.EMAIL
        if scene.breaker.state is BreakerState.OPEN:
            waits.append(scene.breaker.wait_seconds)
            scene.now += waits[-1] + SUSPECT_SECONDS

    assert waits[:3] == [FIRST_OPEN_SECONDS, 2 * FIRST_OPEN_SECONDS, 4 * FIRST_OPEN_SECONDS]
    assert waits[-1] == LONGEST_OPEN_SECONDS


@pytest.mark.parametrize(
    ("senders", "needed"), [(["a@a.example", "b@b.example", "c@c.example"], 3), (["a@a.example"], 3 * ALIKE_FACTOR)]
)
def test_rejections_because_of_the_sender_count_by_senders(scene: Scene, senders: list[str], needed: int) -> None:
    emails = [email(sender=senders[number % len(senders)]) for number in range(needed)]
    blames = [scene.reject(each, in_a_row=SENDER.in_a_row, by_sender=True) for each in emails]

    assert blames == [Blame.UNKNOWN] * (needed - 1) + [Blame.PROVIDER]


def test_the_number_of_remembered_emails_is_limited() -> None:
    suspects, first = SuspectEmails(), email()
    suspects.note(first, 0, 0)

    for _ in range(MAX_REMEMBERED):
        suspects.note(email(), 0, 0)

    assert suspects.times(first) == 0
