"""The oracle finds every kind of violation in made-up records, and no violation in correct records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

import pytest

from dispatcher.dev.oracle import Answer, DlqEntry, Records, Row, judge
from dispatcher.dev.wire import Disturbance, Exchange, Fragment, RecordedAttempt, Wire

SENT, FAILED, HELD, STRANGER = (UUID(int=number) for number in range(1, 5))
WORKER = "host:w0:77:abcd"


def attempt(email_id: UUID, outcome: str, number: int = 1, started_at: float = 100.0) -> RecordedAttempt:
    return RecordedAttempt(email_id, number, WORKER, started_at, started_at + 0.3, outcome)


CANCELLED = Row("never-committed", "cancelled", reason="cancelled")

GOOD = Records(
    requested_keys=frozenset({"a", "b", "c", "never-committed"}),
    answers=[Answer("a", SENT, "accepted"), Answer("a", SENT, "known"), Answer("b", FAILED, "accepted")],
    rows={SENT: Row("a", "sent"), FAILED: Row("b", "failed"), HELD: Row("c", "held")},
    attempts=[attempt(SENT, "accepted"), attempt(FAILED, "rejected"), attempt(HELD, "uncertain")],
    dlq_entries=[DlqEntry(FAILED, "failed"), DlqEntry(HELD, "held"), DlqEntry(SENT, "held")],
    unknown_messages=[b"[]"],
    garbage=frozenset({b"[]", b"{}"}),
    accepted={SENT: 1, HELD: 1},
    wire=Wire([Exchange(SENT, 100.1, 100.2), Exchange(HELD, 100.1)]),
)


def with_row(email_id: UUID, row: Row) -> Records:
    return replace(GOOD, rows={**GOOD.rows, email_id: row})


def delivered(times: Mapping[str, int], row: Row = GOOD.rows[SENT]) -> Records:
    """The records of an email to two recipients, with the number of acceptances for each."""
    deliveries = {(SENT, address): count for address, count in times.items()}
    accepted = {**GOOD.accepted, SENT: max(times.values())}
    recipients, rows = {SENT: ["a@x", "b@x"]}, {**GOOD.rows, SENT: row}
    entries = [entry for entry in GOOD.dlq_entries if entry.email_id != SENT or row.status != "failed"]
    if row.status == "failed":
        entries.append(DlqEntry(SENT, "failed"))
    return replace(
        GOOD, rows=rows, accepted=accepted, recipients=recipients, deliveries=deliveries, dlq_entries=entries
    )


BAD: dict[str, Records] = {
    "answered and without a row": replace(GOOD, answers=[*GOOD.answers, Answer("c", STRANGER, "accepted")]),
    "answered under another key": replace(GOOD, answers=[*GOOD.answers, Answer("b", HELD, "known")]),
    "keys with two emails": with_row(STRANGER, Row("a", "failed")),
    "keys accepted twice": replace(GOOD, answers=[*GOOD.answers, Answer("a", SENT, "accepted")]),
    "keys that no producer used": with_row(STRANGER, Row("d", "failed")),
    "neither sent nor failed nor held nor cancelled": with_row(HELD, Row("c", "sending")),
    "messages left on the send queue": replace(GOOD, waiting=1),
    "sent and never accepted": replace(GOOD, accepted={HELD: 1}),
    'sent after "cancelled"': replace(GOOD, cancelled_at={SENT: 100.0}),
    '"cancelled", but it has another status': replace(GOOD, cancelled_at={FAILED: 1000.0}),
    '"too late", but never leased': replace(GOOD, too_late=frozenset({FAILED})),
    "cancelled without a request": with_row(STRANGER, CANCELLED),
    "expired without an expiry": with_row(STRANGER, replace(CANCELLED, reason="expired")),
    "failed and accepted": replace(GOOD, accepted={**GOOD.accepted, FAILED: 1}),
    "accepted and never enqueued": replace(GOOD, accepted={**GOOD.accepted, STRANGER: 1}),
    "accepted more than once": replace(GOOD, accepted={**GOOD.accepted, SENT: 2}),
    "failed or held without a dead letter": replace(GOOD, dlq_entries=[DlqEntry(FAILED, "failed")]),
    "dead letter with a wrong status": replace(GOOD, dlq_entries=[*GOOD.dlq_entries, DlqEntry(SENT, "failed")]),
    "on the DLQ and not garbage": replace(GOOD, unknown_messages=[b"a message of ours"]),
    "failed without a refusal": replace(GOOD, refused_keys=frozenset()),
    "refused and not failed": replace(GOOD, refused_keys=frozenset({"a", "b"})),
    "held without need": replace(GOOD, wire=Wire()),
    "held under resend": replace(GOOD, policy="resend"),
    "leases recovered without need": replace(GOOD, expired_at=[140.0], fault_times=[100.0, 150.0]),
    "not sent although an event proves it": replace(GOOD, reported=frozenset({HELD})),
    "too few accepted emails settled by events": replace(
        GOOD,
        reported=frozenset(),
        rows={UUID(int=number): Row(str(number), "held") for number in range(100, 120)},
        accepted={UUID(int=number): 1 for number in range(100, 120)},
    ),
    "accepted for another recipient": delivered({"a@x": 1, "b@x": 1, "c@x": 1}),
    "forged events that were accepted": replace(GOOD, reported=frozenset(), forgeries=1),
    "settled without an event": replace(GOOD, reported=frozenset(), settled=frozenset({SENT})),
    "processes": replace(GOOD, faults=["the last run ended with 1"]),
}


LOST = {
    "answered and without a row": 1,
    "neither sent nor failed nor held nor cancelled": 1,
    "sent and never accepted": 1,
    "too few accepted emails settled by events": 2,  # two of the emails of GOOD have no row
}


def test_correct_records_have_no_violations() -> None:
    verdict = judge(replace(GOOD, refused_keys=frozenset({"b"})))

    assert verdict.is_good, verdict.violations
    assert verdict.counts == {"sent": 1, "failed": 1, "held": 1}
    assert (verdict.enqueued, verdict.lost, verdict.duplicates) == (3, 0, 0)
    assert (verdict.held_on_wire, verdict.held_at_edge, verdict.held_unexplained) == (1, 0, 0)


@pytest.mark.parametrize("name", BAD)
def test_every_kind_of_violation_is_found(name: str) -> None:
    verdict = judge(BAD[name])

    assert name in verdict.violations, verdict.violations
    assert not verdict.is_good
    assert verdict.lost == LOST.get(name, 0)


PARTLY = Row("a", "failed", reason="partly_delivered")


@pytest.mark.parametrize(
    ("records", "lost", "duplicates", "violation"),
    [
        (delivered({"a@x": 1, "b@x": 1}), 0, 0, None),
        (delivered({"a@x": 1}), 1, 0, "sent, and a recipient is left out"),
        (delivered({"a@x": 2, "b@x": 1}), 0, 1, "accepted more than once"),
        (delivered({"a@x": 2, "b@x": 3}), 0, 3, "accepted more than once"),
        (replace(GOOD, accepted={SENT: 4, HELD: 2}), 0, 4, "accepted more than once"),
        (delivered({"a@x": 1}, PARTLY), 0, 0, None),
        (delivered({"a@x": 2}, PARTLY), 0, 1, "accepted more than once"),
        (delivered({"a@x": 1, "b@x": 1}, PARTLY), 0, 0, "failed and accepted"),
        (delivered({"a@x": 1}, Row("a", "failed", reason="recipient_deferred")), 0, 0, "failed and accepted"),
    ],
)
def test_each_recipient_is_judged(records: Records, lost: int, duplicates: int, violation: str | None) -> None:
    verdict = judge(records)

    assert list(verdict.violations) == ([violation] if violation else [])
    assert (verdict.lost, verdict.duplicates) == (lost, duplicates)


def resend(accepted: int, *, uncertain: int, expired_leases: int) -> Records:
    attempts = [attempt(SENT, "uncertain", number) for number in range(uncertain)]
    return Records(
        policy="resend",
        requested_keys=frozenset({"a"}),
        answers=[Answer("a", SENT, "accepted")],
        rows={SENT: Row("a", "sent")},
        attempts=[*attempts, attempt(SENT, "accepted", uncertain + 1)],
        expired_leases={SENT: expired_leases},
        accepted={SENT: accepted},
    )


@pytest.mark.parametrize(
    ("accepted", "uncertain", "expired_leases", "is_good"),
    [(1, 0, 0, True), (3, 2, 0, True), (2, 0, 1, True), (2, 0, 0, False), (4, 1, 1, False)],
)
def test_under_resend_an_email_may_be_accepted_again_once_for_each_unknown_outcome(
    accepted: int, uncertain: int, expired_leases: int, is_good: bool
) -> None:
    verdict = judge(resend(accepted, uncertain=uncertain, expired_leases=expired_leases))

    assert list(verdict.violations) == ([] if is_good else ["accepted again without an unknown outcome"])


def held(exchanges: list[Exchange], disturbances: list[Disturbance]) -> Records:
    return replace(GOOD, wire=Wire(exchanges), disturbances=disturbances)


KILLED = Disturbance(77, 100.5)
FROZEN = Disturbance(77, 100.5, 104.0)
ANOTHER = Disturbance(78, 100.5)
CUT_OFF = Fragment(100.2, 100.51)
BY_THE_RELAY = replace(attempt(HELD, "uncertain"), worker="host:w0:relay")
EARLIER = attempt(HELD, "deferred", 0, started_at=49.9)

ON_THE_WIRE = {  # a request whose answer reached no worker
    "no answer was written": held([Exchange(HELD, 100.1)], []),
    "cut off while it arrived": replace(held([], [KILLED]), wire=Wire(fragments=[CUT_OFF])),
    "into a connection that the provider closed": replace(GOOD, wire=Wire(closed_at=[100.2])),
}
AT_THE_EDGE = {  # a worker killed in a moment that no ledger distinguishes
    "before its first byte": held([], [KILLED]),
    "before its first byte, and another's was cut off long before": replace(
        held([], [KILLED]), wire=Wire(fragments=[Fragment(90.0, 90.1)])
    ),
    "frozen, and recorded by the relay": replace(held([], [FROZEN]), attempts=[BY_THE_RELAY]),
    "just after its answer": held([Exchange(HELD, 100.1, 100.499)], [KILLED]),
}
UNEXPLAINED = {
    "no request, and no worker was killed": held([], []),
    "no request, and another worker was killed": held([], [ANOTHER]),
    "no request, and a connection was closed later": replace(GOOD, wire=Wire(closed_at=[100.4])),
    "killed before": held([], [Disturbance(77, 90.0, 95.0)]),
    "answered long before the kill": held([Exchange(HELD, 100.1, 100.2)], [Disturbance(77, 104.0)]),
    "answered, and no worker was killed": held([Exchange(HELD, 100.1, 100.2)], []),
    "unanswered was an earlier attempt's request": replace(
        held([Exchange(HELD, 50.0)], []), attempts=[*GOOD.attempts, EARLIER]
    ),
}
HOLDS = [
    pytest.param(records, counts, id=name)
    for counts, group in (((1, 0, 0), ON_THE_WIRE), ((0, 1, 0), AT_THE_EDGE), ((0, 0, 1), UNEXPLAINED))
    for name, records in group.items()
]


@pytest.mark.parametrize(("records", "counts"), HOLDS)
def test_a_held_email_is_explained_by_the_wire_or_by_the_edge_of_a_kill_or_it_is_a_violation(
    records: Records, counts: tuple[int, int, int]
) -> None:
    verdict = judge(records)

    assert (verdict.held_on_wire, verdict.held_at_edge, verdict.held_unexplained) == counts
    assert list(verdict.violations) == (["held without need"] if verdict.held_unexplained else [])


def test_a_deleted_ledger_explains_only_the_emails_that_its_worker_had_leased() -> None:
    no_trace = replace(held([], []), attempts=[])

    verdict = judge(replace(no_trace, unledgered=frozenset({HELD})))

    assert (verdict.held_without_ledger, verdict.held_unexplained) == (1, 0)
    assert judge(replace(no_trace, unledgered=frozenset({SENT}))).held_unexplained == 1


def test_one_fragment_explains_one_email() -> None:
    other = attempt(STRANGER, "uncertain")
    records = replace(
        with_row(STRANGER, Row("d", "held")),
        attempts=[*GOOD.attempts, other],
        wire=Wire(fragments=[CUT_OFF]),
        disturbances=[KILLED],
    )

    verdict = judge(records)

    assert (verdict.held_on_wire, verdict.held_at_edge) == (1, 1)


def test_a_held_email_that_failed_when_its_host_was_back_keeps_the_dead_letter_of_its_recovery() -> None:
    records = replace(GOOD, dlq_entries=[*GOOD.dlq_entries, DlqEntry(FAILED, "held")])

    assert "dead letter with a wrong status" in judge(records).violations
    assert judge(replace(records, expired_leases={FAILED: 1})).is_good


def test_the_wire_is_read_from_the_doubles_record() -> None:
    def event(connection: int, name: str, at: float, **fields: object) -> dict[str, object]:
        return {"connection": connection, "event": name, "at": at, **fields}

    wire = Wire.of(
        [
            event(1, "began", 1.0), event(1, "read", 1.1, email_id=str(SENT)), event(1, "answered", 1.2),
            event(1, "began", 2.0), event(2, "began", 2.1), event(2, "read", 2.2, email_id=str(HELD)),
            event(2, "answered", 2.3), event(1, "ended", 2.4, by_us=False, by_reset=False),
            event(2, "ended", 2.5, by_us=False, by_reset=True), event(3, "ended", 2.6, by_us=True, by_reset=False),
        ]
    )  # fmt: skip

    assert wire.exchanges == [Exchange(SENT, 1.1, 1.2), Exchange(HELD, 2.2, 2.3, was_read=False)]
    assert wire.fragments == [Fragment(2.0, 2.4)]
    assert wire.closed_at == [2.6]
