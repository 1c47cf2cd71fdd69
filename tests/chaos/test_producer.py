"""Killed producers continue from their files, and the seed determines the adversary's cards."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from dispatcher import Email
from tests.chaos.actions import DECK, EVENT_CARDS
from tests.chaos.diary import Diary
from tests.chaos.harness import HarnessFailed
from tests.chaos.producer import email_of, read_notes, recipients_of
from tests.chaos.producers import Producers
from tests.chaos.storm import StormPlan, drawn
from tests.supervisor.program import eventually


def test_a_key_without_an_answer_is_open(tmp_path: Path) -> None:
    notes = tmp_path / "p0.notes"
    notes.write_bytes(b'\n{"keys":["a","b"]}\n\n{"answers":[["a","1","accepted"]]}\n\n{"keys":["c"]}\n')

    found = read_notes(notes)

    assert found.answers == (("a", "1", "accepted"),)
    assert found.open_keys == ["b", "c"]


def test_a_line_cut_by_a_kill_hides_no_other_line(tmp_path: Path) -> None:
    notes = tmp_path / "p0.notes"
    notes.write_bytes(b'\n{"keys":["a"]}\n\n{"answers":[["a","1","acc\n{"keys":["b"]}\n\n{"ans')

    found = read_notes(notes)

    assert found.keys == ("a", "b")
    assert found.open_keys == ["a", "b"]


def test_emails_have_up_to_the_wanted_number_of_recipients_and_no_recipient_has_two_emails() -> None:
    emails = [email_of(f"p0-{number}", "p0", recipients=5) for number in range(50)]
    addresses = [(*email.to, *email.cc, *email.bcc) for email in emails if isinstance(email, Email)]

    assert {len(each) for each in addresses} == {1, 2, 3, 4, 5}
    assert len({address for each in addresses for address in each}) == sum(map(len, addresses))
    assert [sorted(each) for each in addresses] == [sorted(recipients_of(f"p0-{number}", 5)) for number in range(50)]


def test_a_producer_without_notes_has_made_no_call(tmp_path: Path) -> None:
    assert read_notes(tmp_path / "missing").keys == ()


def test_a_shared_key_has_the_same_email_in_every_producer_unless_its_payloads_differ() -> None:
    assert email_of("shared-7", "p0") == email_of("shared-7", "p1")
    assert email_of("shared-40", "p0") != email_of("shared-40", "p1")
    assert email_of("p0-40", "p0") == email_of("p0-40", "p0")


def test_a_producer_that_ends_by_itself_is_a_failure_of_the_harness(tmp_path: Path) -> None:
    (tmp_path / "p1.notes").mkdir()  # the producer cannot write its file, because a folder has the same path
    nowhere = "postgresql://127.0.0.1:1/nothing"
    producers = Producers(tmp_path, nowhere, Diary(tmp_path / "diary.jsonl"), rate=1.0, seconds=60.0)
    try:
        with pytest.raises(HarnessFailed, match=r"(?s)producer p1 ended with 1.*IsADirectoryError"):
            eventually(producers.restart_killed, "the end of a producer")
    finally:
        producers.destroy()


def cards(seed: int, count: int) -> list[str]:
    return list(islice(drawn(StormPlan(1.0, seed)), count))


def test_the_same_seed_draws_the_same_actions_and_every_deck_has_all_of_them() -> None:
    usual = {name: times for name, (_, times) in DECK.items() if name not in EVENT_CARDS}
    size = sum(usual.values())

    assert cards(1, 3 * size) == cards(1, 3 * size)
    assert cards(1, size) != cards(2, size)
    assert set(cards(3, size)) == usual.keys()
