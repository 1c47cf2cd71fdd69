"""When refusals speak against a provider, and when against an email alone, by a clock that the test moves."""

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
    Breaker,
    State,
)
from dispatcher.routing.evidence import ALIKE_FACTOR, MOST_REMEMBERED, Blame, Suspects


def email(domain: str = "", local: str = "ann") -> OutgoingEmail:
    """An email; to a domain of its own unless the test says which."""
    email_id = uuid4()
    address = f"Ann <{local}@{domain or f'{email_id.hex}.example'}>"
    return OutgoingEmail(email_id, datetime.now(UTC), "shop@example.com", (address,), "Hello", "Hi")


@dataclass
class Scene:
    """A breaker and its clock."""

    now: float = 1000.0
    breaker: Breaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = Breaker(lambda: self.now, lambda *_: None, jitter=lambda: 1.0)

    def fail(self, refused: OutgoingEmail, *, by_recipient: bool = False) -> Blame:
        """The provider refuses an email, perhaps as a whole."""
        return self.breaker.fail(self.breaker.begin(), "server_error", refused, by_recipient=by_recipient)

    def throttle(self, refused: OutgoingEmail, seconds: float | None = None) -> Blame:
        """The provider asks an email to slow down."""
        return self.breaker.pause(self.breaker.begin(), seconds, "throttled", refused)

    def fault(self, refused: OutgoingEmail) -> Blame:
        """The provider says to an email that nobody may use it."""
        return self.breaker.open(self.breaker.begin(), "bad credentials", refused)

    def succeed(self) -> None:
        """Another email gets through."""
        self.breaker.succeed(self.breaker.begin())

    def half_open(self, domain: str = "") -> OutgoingEmail:
        """It failed, and its time is over; returns the last email that it refused."""
        while self.fail(last := email(domain)) is not Blame.PROVIDER:
            pass
        self.now += self.breaker.wait_seconds
        assert self.breaker.state is State.HALF_OPEN
        return last


def test_refusals_of_emails_to_several_domains_open_it_after_as_many_as_ever() -> None:
    scene = Scene()

    blames = [scene.fail(email()) for _ in range(FAILURES_IN_A_ROW)]

    assert blames == [Blame.EMAIL] * (FAILURES_IN_A_ROW - 1) + [Blame.PROVIDER]


def test_one_email_that_is_refused_ever_again_opens_nothing() -> None:
    scene, bad = Scene(), email()

    assert {scene.fail(bad) for _ in range(1000)} == {Blame.EMAIL}


def test_emails_to_one_domain_alone_need_to_be_many() -> None:
    scene = Scene()

    blames = [scene.fail(email("bad.example")) for _ in range(FAILURES_IN_A_ROW * ALIKE_FACTOR)]

    assert blames.index(Blame.PROVIDER) == FAILURES_IN_A_ROW * ALIKE_FACTOR - 1


def test_many_emails_to_one_mailbox_that_the_provider_refuses_open_nothing() -> None:
    scene = Scene()

    assert {scene.fail(email("bad.example"), by_recipient=True) for _ in range(1000)} == {Blame.EMAIL}


def test_a_recipient_that_was_refused_before_others_got_through_is_no_witness_any_more() -> None:
    scene = Scene()
    bad = [email() for _ in range(FAILURES_IN_A_ROW - 1)]
    for each in bad:
        scene.fail(each, by_recipient=True)
    scene.succeed()

    assert {scene.fail(each, by_recipient=True) for each in [*bad, email()]} == {Blame.EMAIL}


def test_a_recipient_that_is_refused_shows_that_a_server_that_was_away_is_back() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW):
        scene.breaker.fail(scene.breaker.begin(), "connection_failed", in_a_row=UNREACHED_IN_A_ROW)
    scene.now += scene.breaker.wait_seconds

    assert scene.fail(email(), by_recipient=True) is Blame.EMAIL
    assert scene.breaker.state is State.CLOSED


def test_recipients_that_are_refused_do_not_show_that_a_server_is_back_that_refused_every_recipient() -> None:
    scene = Scene()
    while scene.fail(email(), by_recipient=True) is not Blame.PROVIDER:
        pass
    scene.now += scene.breaker.wait_seconds

    assert scene.fail(email(), by_recipient=True) is Blame.PROVIDER


def test_failures_before_the_provider_was_told_of_an_email_always_count() -> None:
    scene = Scene()

    for _ in range(FAILURES_IN_A_ROW):
        scene.breaker.fail(scene.breaker.begin(), "server_error")

    assert scene.breaker.state is State.OPEN


def test_an_email_that_was_refused_leaves_the_probe_to_others_for_a_moment() -> None:
    scene = Scene()
    last = scene.half_open()

    assert (scene.breaker.admits(last), scene.breaker.admits(email())) == (False, True)
    assert scene.breaker.doubt_seconds(last) == SUSPECT_SECONDS
    scene.now += SUSPECT_SECONDS

    assert scene.breaker.admits(last)


def test_an_email_to_a_domain_that_was_refused_leaves_the_probe_to_others() -> None:
    scene = Scene()
    scene.half_open("bad.example")

    assert not scene.breaker.admits(email("bad.example"))
    assert scene.breaker.admits(email("good.example"))


def test_several_probes_fail_before_it_opens_again_for_longer() -> None:
    scene = Scene()
    scene.half_open()

    for _ in range(PROBES - 1):
        assert scene.fail(email()) is Blame.PROVIDER
        assert (scene.breaker.state, scene.breaker.room) == (State.HALF_OPEN, 1)
    scene.fail(email())

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (State.OPEN, 2 * FIRST_OPEN_SECONDS)


def test_a_probe_that_nobody_else_could_be_opens_it_again_but_for_no_longer() -> None:
    scene = Scene()
    last = scene.half_open()

    for _ in range(3):
        scene.now += SUSPECT_SECONDS
        assert scene.fail(last) is Blame.PROVIDER
        assert scene.breaker.wait_seconds == FIRST_OPEN_SECONDS
        scene.now += FIRST_OPEN_SECONDS


def test_a_provider_that_throttles_several_without_a_time_is_paused_and_one_alone_waits_by_itself() -> None:
    scene = Scene()

    blames = [scene.throttle(email()) for _ in range(THROTTLED_IN_A_ROW)]

    assert blames == [Blame.UNKNOWN, Blame.PROVIDER]
    assert (scene.breaker.state, scene.breaker.wait_seconds) == (State.PAUSED, DEFAULT_PAUSE_SECONDS)


def test_a_provider_that_names_a_time_is_paused_at_once() -> None:
    scene = Scene()

    assert scene.throttle(email(), 30.0) is Blame.PROVIDER
    assert scene.breaker.wait_seconds == 30.0


def test_an_email_that_would_pause_it_a_second_time_is_blamed_itself_once_others_got_through() -> None:
    scene, bad = Scene(), email()
    scene.throttle(bad, 30.0)
    scene.now += 30.0
    scene.succeed()

    assert scene.throttle(bad, 30.0) is Blame.EMAIL
    assert scene.breaker.state is State.CLOSED


def test_an_email_that_is_throttled_alone_burns_no_attempt_and_pauses_nobody_for_as_long_as_it_is_alone() -> None:
    scene, lone = Scene(), email()
    waits = []

    for _ in range(10):
        assert scene.throttle(lone) is Blame.UNKNOWN
        waits.append(scene.breaker.lone_seconds(lone))

    assert scene.breaker.state is State.CLOSED
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == waits[-2] == 64.0


def test_a_fault_that_only_one_email_ever_meets_is_its_own() -> None:
    scene, bad = Scene(), email()

    assert scene.fault(bad) is Blame.PROVIDER
    scene.now += FIRST_OPEN_SECONDS
    scene.succeed()

    assert scene.fault(bad) is Blame.EMAIL
    assert scene.breaker.state is State.CLOSED


def test_a_fault_that_everybody_meets_keeps_it_open() -> None:
    scene, lone = Scene(), email()

    for _ in range(10):
        assert scene.fault(lone) is Blame.PROVIDER
        scene.now += scene.breaker.wait_seconds


def test_no_more_emails_are_remembered_than_some_hundreds() -> None:
    suspects, first = Suspects(), email()
    suspects.note(first, 0)

    for _ in range(MOST_REMEMBERED):
        suspects.note(email(), 0)

    assert suspects.times(first) == 0
