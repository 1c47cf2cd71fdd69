"""Producers that are killed: what they wrote down is what they go on from, and the adversary's cards are the seed's."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.chaos.deeds import DECK
from tests.chaos.diary import Diary
from tests.chaos.harness import HarnessFailed
from tests.chaos.producer import email_of, read_notes
from tests.chaos.producers import Producers
from tests.chaos.storm import Plan, drawn
from tests.supervisor.program import eventually


def test_what_was_asked_and_not_answered_is_open(tmp_path: Path) -> None:
    notes = tmp_path / "p0.notes"
    notes.write_bytes(b'\n{"asked":["a","b"]}\n\n{"told":[["a","1","accepted"]]}\n\n{"asked":["c"]}\n')

    found = read_notes(notes)

    assert found.told == (("a", "1", "accepted"),)
    assert found.open_keys == ["b", "c"]


def test_a_line_that_a_kill_has_torn_hides_no_other(tmp_path: Path) -> None:
    notes = tmp_path / "p0.notes"
    notes.write_bytes(b'\n{"asked":["a"]}\n\n{"told":[["a","1","acc\n{"asked":["b"]}\n\n{"tol')

    found = read_notes(notes)

    assert found.asked == ("a", "b")
    assert found.open_keys == ["a", "b"]


def test_a_producer_that_has_written_nothing_has_asked_nothing(tmp_path: Path) -> None:
    assert read_notes(tmp_path / "missing").asked == ()


def test_a_shared_key_is_the_same_email_whoever_asks_unless_it_is_an_impostors() -> None:
    assert email_of("shared-7", "p0") == email_of("shared-7", "p1")
    assert email_of("shared-40", "p0") != email_of("shared-40", "p1")
    assert email_of("p0-40", "p0") == email_of("p0-40", "p0")


def test_a_producer_that_ends_by_itself_is_the_harness_that_failed(tmp_path: Path) -> None:
    (tmp_path / "p1.notes").mkdir()  # where it wants to write its notes
    nowhere = "postgresql://127.0.0.1:1/nothing"
    producers = Producers(tmp_path, nowhere, Diary(tmp_path / "diary.jsonl"), rate=1.0, seconds=60.0)
    try:
        with pytest.raises(HarnessFailed, match=r"(?s)producer p1 ended with 1.*IsADirectoryError"):
            eventually(producers.revive, "the end of a producer")
    finally:
        producers.destroy()


def cards(seed: int, count: int) -> list[str]:
    return list(islice(drawn(Plan(1.0, seed)), count))


def test_the_same_seed_draws_the_same_deeds_and_no_deck_forgets_one() -> None:
    size = sum(times for _, times in DECK.values())

    assert cards(1, 3 * size) == cards(1, 3 * size)
    assert cards(1, size) != cards(2, size)
    assert set(cards(3, size)) == DECK.keys()
