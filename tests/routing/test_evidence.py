"""Tests which refusals count against the provider, and which count only against the email."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.routing.breaker import (
    DEFAULT_PAUSE_SECONDS,
    FAILURES_IN_A_ROW,
    FIRST_OPEN_SECONDS,
    PROBES,
    SUSPECT_SECONDS,
    THROTTLED_IN_A_ROW,
    UNREACHED_IN_A_ROW,
    BreakerState,
    CircuitBreaker,
)
from dispatcher.routing.evidence import ALIKE_FACTOR, MAX_REMEMBERED, Blame, SuspectEmails


def email(domain: str = "", local: str = "ann") -> OutgoingEmail:
    """An email to this address, by default to a unique domain."""
    email_id = uuid4()
    address = f"Ann <{local}@{domain or f'{email_id.hex}.example'}>"
    return OutgoingEmail(email_id, datetime.now(UTC), "shop@example.com", (address,), "Hello", "Hi")


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


def test_the_number_of_remembered_emails_is_limited() -> None:
    suspects, first = SuspectEmails(), email()
    suspects.note(first, 0, 0)

    for _ in range(MAX_REMEMBERED):
        suspects.note(email(), 0, 0)

    assert suspects.times(first) == 0
