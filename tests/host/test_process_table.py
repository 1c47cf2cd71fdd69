"""Children write to the process table, and the parent and the monitor read it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from dispatcher.host.process_table import REASON_OCTETS, ProcessStatus, ProcessTable
from tests.waiting import wait_until


@pytest.fixture
def process_table() -> ProcessTable:
    """The processes of a host, for any number of workers and one relay."""
    return ProcessTable(["worker", "relay"])


def test_other_processes_read_what_a_forked_child_writes(process_table: ProcessTable) -> None:
    process_slot = process_table.take_slot("relay", 0)
    process_slot.begin()

    pid = os.fork()
    if pid == 0:
        process_slot.mark_up()
        process_slot.beat()
        process_slot.beat()
        os._exit(0)
    os.waitpid(pid, 0)
    process_slot.note_process(pid)

    (status,) = process_table.statuses()
    assert replace(status, age_seconds=None) == ProcessStatus(
        role="relay", number=0, pid=pid, is_up=True, is_ending=False, failed_boots=0, beats=2
    )
    assert status.age_seconds is not None
    assert status.age_seconds < 60
    assert process_slot.is_up
    assert not process_slot.wants_successor


def test_a_host_is_ready_if_every_process_is_up_and_otherwise_names_missing_ones(
    process_table: ProcessTable,
) -> None:
    first, second, third = (process_table.take_slot("worker", number) for number in range(3))
    relay = process_table.take_slot("relay", 0)
    for number, process_slot in enumerate((first, second, relay)):
        process_slot.begin()
        process_slot.note_process(100 + number)
    third.note_failed_boots(4)
    third.note_reason("No space left on device. Make room.")
    relay.mark_up()

    assert process_table.unready() == [
        "worker 0 is starting.",
        "worker 1 is starting.",
        "worker 2 could not boot, 4 times in a row: No space left on device. Make room.",
    ]

    first.mark_up()
    second.note_ending()
    third.free()
    assert process_table.unready() == []


def test_a_row_is_reset_for_the_next_process_and_counts_restarts(process_table: ProcessTable) -> None:
    process_slot = process_table.take_slot("worker", 0)
    process_slot.begin()
    process_slot.note_process(100)
    process_slot.mark_up()
    process_slot.ask_for_successor()
    process_slot.note_process(None)
    process_slot.note_restart()
    assert process_table.unready() == ["worker 0 is waiting to be restarted."]
    waiting = process_table.statuses()[0]

    process_slot.begin()
    process_slot.note_process(101)

    running = process_table.statuses()[0]
    assert not process_slot.wants_successor
    assert process_table.unready() == ["worker 0 is starting."]
    assert (waiting.restarts, waiting.age_seconds) == (1, None)
    assert running.restarts == 1
    assert running.age_seconds is not None


def test_a_reason_is_truncated_and_cleared_with_its_row(process_table: ProcessTable) -> None:
    first, second = process_table.take_slot("worker", 0), process_table.take_slot("worker", 1)
    first.note_reason("ü" * 5000)
    second.note_reason("disk full")

    assert len(first.reason.rstrip("\ufffd")) == REASON_OCTETS // 2
    assert [member.reason for member in process_table.statuses()] == [first.reason, "disk full"]
    first.free()
    assert process_table.take_slot("worker", 0).reason == ""


def test_a_freed_row_is_reused(process_table: ProcessTable) -> None:
    for number in range(5000):
        process_table.take_slot("worker", number).free()

    assert process_table.statuses() == []


def test_a_wait_is_measured_from_its_first_begin_until_its_end(process_table: ProcessTable) -> None:
    process_slot = process_table.take_slot("worker", 0)

    def waits() -> tuple[float | None, float | None, float | None]:
        (member,) = process_table.statuses()
        return member.commit_wait_seconds, member.confirm_wait_seconds, member.served_seconds

    assert waits() == (None, None, None)

    process_slot.commit.begin()
    wait_until(lambda: (process_slot.commit.seconds or 0) > 0.01)
    process_slot.commit.begin()
    process_slot.note_served()
    commit, confirm, served = waits()
    assert commit is not None
    assert served is not None
    assert commit > 0.01 > served >= 0
    assert confirm is None

    process_slot.commit.end()
    assert process_slot.commit.seconds is None

    process_slot.confirm.begin()
    process_slot.note_process(None)  # the process died while it waited
    assert process_slot.confirm.seconds is None
