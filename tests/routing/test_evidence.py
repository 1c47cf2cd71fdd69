"""Tests which refusals count against the provider, and which count only against the email."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
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
from dispatcher.worker.attempts import OTHER_WORKERS_SECONDS


def email(domain: str = "", local: str = "ann", sender: str = "shop@example.com") -> OutgoingEmail:
    """An email to this address, by default to a unique domain."""
    email_id = uuid4()
    address = f"Ann <{local}@{domain or f'{email_id.hex}.example'}>"
    return OutgoingEmail(email_id, datetime.now(UTC), sender, (address,), "Hello", "Hi")


@dataclass
class Scene:
    """A circuit breaker and its clock."""

    now: float = 1000.0
    breaker: CircuitBreaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = CircuitBreaker(lambda: self.now, lambda *_: None, jitter=lambda: 1.0)

    def fail(self, refused: OutgoingEmail, *, by_recipient: bool = False) -> Blame:
        """The provider refuses an email, and may have failed itself."""
        return self.breaker.fail(self.breaker.begin(), "server_error", refused, by_recipient=by_recipient)

    def throttle(self, refused: OutgoingEmail, seconds: float | None = None) -> Blame:
        """The provider throttles an email."""
        return self.breaker.pause(self.breaker.begin(), seconds, "throttled", refused)

    def fault(self, refused: OutgoingEmail) -> Blame:
        """The provider answers an email with an error that makes the provider unusable, such as bad credentials."""
        return self.breaker.open(self.breaker.begin(), "bad credentials", refused)

    def reject(
        self,
        refused: OutgoingEmail,
        *,
        in_a_row: int = FAILURES_IN_A_ROW,
        by_sender: bool = False,
        seconds: float | None = None,
        gives_up: bool = True,
    ) -> Blame:
        """The provider refuses an email, by default in words that show no cause."""
        return self.breaker.refuse(
            self.breaker.begin(),
            "refused",
            refused,
            in_a_row=in_a_row,
            by_sender=by_sender,
            seconds=seconds,
            gives_up=gives_up,
        )

    def succeed(self) -> None:
        """The provider accepts a different email."""
        self.breaker.succeed(self.breaker.begin())

    def half_open(self, domain: str = "") -> OutgoingEmail:
        """Opens the breaker, and moves the clock until it is half open; returns the last refused email."""
        while self.fail(last := email(domain)) is not Blame.PROVIDER:
            pass
        self.now += self.breaker.wait_seconds
        assert self.breaker.state is BreakerState.HALF_OPEN
        return last


def test_refusals_to_several_domains_open_the_breaker_at_the_usual_count() -> None:
    scene = Scene()

    blames = [scene.fail(email()) for _ in range(FAILURES_IN_A_ROW)]

    assert blames == [Blame.EMAIL] * (FAILURES_IN_A_ROW - 1) + [Blame.PROVIDER]


def test_repeated_refusals_of_one_email_do_not_open_the_breaker() -> None:
    scene, bad = Scene(), email()

    assert {scene.fail(bad) for _ in range(1000)} == {Blame.EMAIL}


def test_refusals_to_a_single_domain_open_the_breaker_only_at_a_higher_count() -> None:
    scene = Scene()

    blames = [scene.fail(email("bad.example")) for _ in range(FAILURES_IN_A_ROW * ALIKE_FACTOR)]

    assert blames.index(Blame.PROVIDER) == FAILURES_IN_A_ROW * ALIKE_FACTOR - 1


def test_refusals_of_one_mailbox_do_not_open_the_breaker() -> None:
    scene = Scene()

    assert {scene.fail(email("bad.example"), by_recipient=True) for _ in range(1000)} == {Blame.EMAIL}


def test_a_recipient_refused_before_other_successes_no_longer_counts() -> None:
    scene = Scene()
    bad = [email() for _ in range(FAILURES_IN_A_ROW - 1)]
    for each in bad:
        scene.fail(each, by_recipient=True)
    scene.succeed()

    assert {scene.fail(each, by_recipient=True) for each in [*bad, email()]} == {Blame.EMAIL}


def test_a_refused_recipient_shows_that_an_unreachable_server_is_back() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW):
        scene.breaker.fail(scene.breaker.begin(), "connection_failed", in_a_row=UNREACHED_IN_A_ROW)
    scene.now += scene.breaker.wait_seconds

    assert scene.fail(email(), by_recipient=True) is Blame.EMAIL
    assert scene.breaker.state is BreakerState.CLOSED


def test_refused_recipients_do_not_show_recovery_of_a_server_that_refused_every_recipient() -> None:
    scene = Scene()
    while scene.fail(email(), by_recipient=True) is not Blame.PROVIDER:
        pass
    scene.now += scene.breaker.wait_seconds

    assert scene.fail(email(), by_recipient=True) is Blame.PROVIDER


def test_failures_before_the_provider_saw_an_email_always_count() -> None:
    scene = Scene()

    for _ in range(FAILURES_IN_A_ROW):
        scene.breaker.fail(scene.breaker.begin(), "server_error")

    assert scene.breaker.state is BreakerState.OPEN


def test_a_refused_email_waits_while_others_may_probe() -> None:
    scene = Scene()
    last = scene.half_open()

    assert (scene.breaker.admits(last), scene.breaker.admits(email())) == (False, True)
    assert scene.breaker.suspect_wait_seconds(last) == SUSPECT_SECONDS
    scene.now += SUSPECT_SECONDS

    assert scene.breaker.admits(last)


def test_an_email_to_a_refused_domain_waits_while_others_may_probe() -> None:
    scene = Scene()
    scene.half_open("bad.example")

    assert not scene.breaker.admits(email("bad.example"))
    assert scene.breaker.admits(email("good.example"))


def test_several_failed_probes_open_the_breaker_for_longer() -> None:
    scene = Scene()
    scene.half_open()

    for _ in range(PROBES - 1):
        assert scene.fail(email()) is Blame.PROVIDER
        assert (scene.breaker.state, scene.breaker.room) == (BreakerState.HALF_OPEN, 1)
    scene.fail(email())

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (BreakerState.OPEN, 2 * FIRST_OPEN_SECONDS)


def test_a_failed_probe_by_a_suspect_opens_the_breaker_for_no_longer() -> None:
    scene = Scene()
    last = scene.half_open()

    for _ in range(3):
        scene.now += SUSPECT_SECONDS
        assert scene.fail(last) is Blame.PROVIDER
        assert scene.breaker.wait_seconds == FIRST_OPEN_SECONDS
        scene.now += FIRST_OPEN_SECONDS


def test_throttling_of_several_emails_without_a_time_pauses_the_provider_and_of_one_only_that_email() -> None:
    scene = Scene()

    blames = [scene.throttle(email()) for _ in range(THROTTLED_IN_A_ROW)]

    assert blames == [Blame.UNKNOWN, Blame.PROVIDER]
    assert (scene.breaker.state, scene.breaker.wait_seconds) == (BreakerState.PAUSED, DEFAULT_PAUSE_SECONDS)


def test_throttling_with_a_time_pauses_the_provider_at_once() -> None:
    scene = Scene()

    assert scene.throttle(email(), 30.0) is Blame.PROVIDER
    assert scene.breaker.wait_seconds == 30.0


def test_an_email_throttled_again_after_other_successes_is_blamed_itself() -> None:
    scene, bad = Scene(), email()
    scene.throttle(bad, 30.0)
    scene.now += 30.0
    scene.succeed()

    assert scene.throttle(bad, 30.0) is Blame.EMAIL
    assert scene.breaker.state is BreakerState.CLOSED


def test_a_single_throttled_email_uses_no_attempt_and_pauses_no_provider() -> None:
    scene, lone = Scene(), email()
    waits = []

    for _ in range(10):
        assert scene.throttle(lone) is Blame.UNKNOWN
        waits.append(scene.breaker.single_email_wait_seconds(lone))

    assert scene.breaker.state is BreakerState.CLOSED
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == waits[-2] == 64.0


def test_a_fault_that_only_one_email_meets_is_blamed_on_that_email() -> None:
    scene, bad = Scene(), email()

    assert scene.fault(bad) is Blame.PROVIDER
    scene.now += FIRST_OPEN_SECONDS
    scene.succeed()

    assert scene.fault(bad) is Blame.EMAIL
    assert scene.breaker.state is BreakerState.CLOSED


def test_a_fault_that_every_email_meets_keeps_the_breaker_open() -> None:
    scene, lone = Scene(), email()

    for _ in range(10):
        assert scene.fault(lone) is Blame.PROVIDER
        scene.now += scene.breaker.wait_seconds


def test_rejections_of_several_emails_without_an_acceptance_are_the_providers() -> None:
    scene = Scene()

    blames = [scene.reject(email()) for _ in range(FAILURES_IN_A_ROW)]

    assert blames == [Blame.UNKNOWN] * (FAILURES_IN_A_ROW - 1) + [Blame.PROVIDER]


def test_three_rejected_emails_to_three_domains_are_enough_if_all_are_rejected_again() -> None:
    scene, backlog = Scene(), [email() for _ in range(3)]

    blames = [scene.reject(each) for _ in range(3) for each in backlog]

    assert blames[:8] == [Blame.UNKNOWN] * 7 + [Blame.PROVIDER]


def test_a_lone_rejected_email_fails_after_five_minutes_and_a_dozen_tries() -> None:
    scene, lone = Scene(), email()
    began_at, tries = scene.now, 1

    while scene.reject(lone) is Blame.UNKNOWN:
        scene.now += scene.breaker.single_email_wait_seconds(lone)
        tries += 1

    assert UNCLEAR_SECONDS <= scene.now - began_at < UNCLEAR_SECONDS + LONGEST_OPEN_SECONDS + 5
    assert tries <= 12
    assert scene.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("domain", "workers"), [("", 1), ("", 2), ("", 6), ("", 16), ("one.example", 1), ("one.example", 2)]
)
def test_one_rejected_email_per_minute_is_enough_to_find_the_provider_at_fault(domain: str, workers: int) -> None:
    """Emails with long waits are released, so any worker may try them next."""
    random, scenes, blames = Random(workers), [Scene() for _ in range(workers)], set[Blame]()
    now = began_at = scenes[0].now
    emails, tries = list[OutgoingEmail](), list[tuple[float, int, Scene]]()

    while ready := [scene for scene in scenes if scene.breaker.reason is None]:
        if now >= began_at + 60 * len(emails):
            tries.append((now, len(emails), random.choice(ready)))
            emails.append(email(domain))
        for each in [each for each in tries if each[0] <= now]:
            tries.remove(each)
            _, number, scene = each
            if scene.breaker.reason is not None:
                tries.append((now + 1, number, random.choice(ready)))
                continue
            scene.now = now
            blames.add(scene.reject(emails[number]))
            wait = scene.breaker.single_email_wait_seconds(emails[number])
            tries.append((now + wait, number, random.choice(ready) if wait >= OTHER_WORKERS_SECONDS else scene))
        now += 0.5

    assert blames == {Blame.UNKNOWN, Blame.PROVIDER}


def test_the_five_minutes_of_a_rejected_email_begin_again_after_a_verdict_against_the_provider() -> None:
    scene, backlog = Scene(), [email() for _ in range(FAILURES_IN_A_ROW)]
    for each in backlog:
        scene.reject(each)
    scene.now += UNCLEAR_SECONDS
    scene.succeed()

    assert scene.reject(backlog[0]) is Blame.UNKNOWN


def test_the_five_minutes_of_a_rejected_email_do_not_begin_with_an_earlier_throttling() -> None:
    scene, lone = Scene(), email()
    scene.throttle(lone)
    scene.now += UNCLEAR_SECONDS

    assert scene.reject(lone) is Blame.UNKNOWN


def test_a_lone_email_that_is_refused_in_known_words_waits() -> None:
    scene, lone = Scene(), email()

    assert {scene.reject(lone, in_a_row=3, gives_up=False) for _ in range(11)} == {Blame.UNKNOWN}


def test_a_rejected_email_fails_at_its_next_rejection_if_a_later_email_is_accepted() -> None:
    scene, bad = Scene(), email()
    scene.reject(bad)
    scene.succeed()

    assert scene.reject(bad) is Blame.EMAIL


def test_an_acceptance_of_an_email_that_was_on_the_wire_before_shows_nothing() -> None:
    scene, refused = Scene(), email()
    earlier = scene.breaker.begin()
    scene.reject(refused)
    scene.breaker.succeed(earlier)

    assert scene.reject(refused) is Blame.UNKNOWN


def test_an_email_whose_rejection_was_the_providers_fault_gets_another_chance() -> None:
    scene, backlog = Scene(), [email() for _ in range(FAILURES_IN_A_ROW)]
    for each in backlog:
        scene.reject(each)
    scene.now += scene.breaker.wait_seconds
    scene.succeed()
    assert scene.breaker.state is BreakerState.CLOSED

    assert scene.reject(backlog[0]) is Blame.UNKNOWN
    scene.succeed()
    assert scene.reject(backlog[0]) is Blame.EMAIL


def test_bad_emails_that_stopped_the_provider_together_fail_at_last() -> None:
    scene, bad = Scene(), [email() for _ in range(3)]
    failed: set[int] = set()

    for _ in range(UNCLEAR_TRIES):
        for number in range(3):
            if scene.reject(bad[number]) is Blame.EMAIL:
                failed.add(number)
        scene.now += scene.breaker.wait_seconds
        scene.succeed()

    assert failed == {0, 1, 2}


def test_a_provider_that_rejects_every_probe_stays_open_for_longer_and_no_email_fails() -> None:
    scene, backlog = Scene(), [email(f"shop{number % 3}.example") for number in range(100)]
    waits = []
    for round_ in range(200):
        assert scene.reject(backlog[round_ % 100]) is not Blame.EMAIL
        if scene.breaker.state is BreakerState.OPEN:
            waits.append(scene.breaker.wait_seconds)
            scene.now += waits[-1] + SUSPECT_SECONDS

    assert waits[:3] == [FIRST_OPEN_SECONDS, 2 * FIRST_OPEN_SECONDS, 4 * FIRST_OPEN_SECONDS]
    assert waits[-1] == LONGEST_OPEN_SECONDS


def test_a_rejection_does_not_close_a_breaker_that_rejections_have_opened_but_an_acceptance_does() -> None:
    scene = Scene()
    scene.half_open()

    assert scene.reject(email()) is Blame.PROVIDER
    blames = [scene.reject(email()) for _ in range(PROBES - 1)]
    assert (blames[-1], scene.breaker.state) == (Blame.PROVIDER, BreakerState.OPEN)
    scene.now += scene.breaker.wait_seconds
    scene.succeed()
    assert scene.breaker.room is None


def test_a_used_up_quota_stops_the_provider_for_its_time_but_at_most_an_hour() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW):
        scene.reject(email(), seconds=86_400.0)

    assert scene.breaker.wait_seconds == LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("senders", "needed"), [(["a@a.example", "b@b.example", "c@c.example"], 3), (["a@a.example"], 3 * ALIKE_FACTOR)]
)
def test_rejections_because_of_the_sender_count_by_senders(senders: list[str], needed: int) -> None:
    scene = Scene()

    emails = [email(sender=senders[number % len(senders)]) for number in range(needed)]
    blames = [scene.reject(each, in_a_row=SENDER.in_a_row, by_sender=True) for each in emails]

    assert blames == [Blame.UNKNOWN] * (needed - 1) + [Blame.PROVIDER]


def test_the_number_of_remembered_emails_is_limited() -> None:
    suspects, first = SuspectEmails(), email()
    suspects.note(first, 0, 0)

    for _ in range(MAX_REMEMBERED):
        suspects.note(email(), 0, 0)

    assert suspects.times(first) == 0
