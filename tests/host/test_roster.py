"""The roster: what children say, and what the parent and the monitor read."""

from __future__ import annotations

import os

from dispatcher.host.roster import REASON_OCTETS, Member, Roster
from tests.waiting import wait_until


def test_what_a_forked_child_says_is_read_by_whoever_has_the_roster() -> None:
    roster = Roster(["worker", "relay"])
    seat = roster.seat("relay", 0)
    seat.begin()

    pid = os.fork()
    if pid == 0:
        seat.up()
        seat.beat()
        seat.beat()
        os._exit(0)
    os.waitpid(pid, 0)
    seat.note_process(pid)

    assert roster.members() == [
        Member(role="relay", number=0, pid=pid, is_up=True, is_ending=False, failed_boots=0, beats=2)
    ]
    assert seat.is_up
    assert not seat.wants_successor


def test_a_host_is_ready_when_everybody_is_up_and_says_what_is_missing_otherwise() -> None:
    roster = Roster(["worker", "relay"])
    first, second, third, relay = (
        roster.seat("worker", 0),
        roster.seat("worker", 1),
        roster.seat("worker", 2),
        roster.seat("relay", 0),
    )
    for number, seat in enumerate((first, second, relay)):
        seat.begin()
        seat.note_process(100 + number)
    third.note_failed_boots(4)
    third.note_reason("No space left on device. Make room.")
    relay.up()

    assert roster.unready() == [
        "worker 0 is starting.",
        "worker 1 is starting.",
        "worker 2 could not boot, 4 times in a row: No space left on device. Make room.",
    ]

    first.up()
    second.note_ending()
    third.leave()
    assert roster.unready() == []


def test_nothing_that_a_predecessor_said_is_true_of_the_next() -> None:
    roster = Roster(["worker"])
    seat = roster.seat("worker", 0)
    seat.up()
    seat.ask_for_successor()
    seat.note_process(None)
    assert roster.unready() == ["worker 0 waits to be started again."]

    seat.begin()
    seat.note_process(101)

    assert not seat.wants_successor
    assert roster.unready() == ["worker 0 is starting."]


def test_a_reason_is_truncated_to_its_room_and_cleared_with_its_seat() -> None:
    roster = Roster(["worker"])
    first, second = roster.seat("worker", 0), roster.seat("worker", 1)
    first.note_reason("ü" * 5000)
    second.note_reason("disk full")

    assert len(first.reason.rstrip("\ufffd")) == REASON_OCTETS // 2
    assert [member.reason for member in roster.members()] == [first.reason, "disk full"]
    first.leave()
    assert roster.seat("worker", 0).reason == ""


def test_a_seat_that_was_left_is_taken_again() -> None:
    roster = Roster(["worker"])

    for number in range(5000):
        roster.seat("worker", number).leave()

    assert roster.members() == []


def test_a_wait_is_as_old_as_its_beginning_until_it_ends() -> None:
    roster = Roster(["worker"])
    seat = roster.seat("worker", 0)

    def waits() -> tuple[float | None, float | None, float | None]:
        (member,) = roster.members()
        return member.commit_wait_seconds, member.confirm_wait_seconds, member.served_seconds

    assert waits() == (None, None, None)

    seat.commit.begin()
    wait_until(lambda: (seat.commit.seconds or 0) > 0.01)
    seat.commit.begin()
    seat.served()
    commit, confirm, served = waits()
    assert commit is not None
    assert served is not None
    assert commit > 0.01 > served >= 0
    assert confirm is None

    seat.commit.end()
    assert seat.commit.seconds is None

    seat.confirm.begin()
    seat.note_process(None)  # it died while it waited
    assert seat.confirm.seconds is None
