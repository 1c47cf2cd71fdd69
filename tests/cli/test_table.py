"""Plain tables: aligned, as narrow as the terminal where words allow it, and obeyed by no terminal."""

from __future__ import annotations

from dispatcher.cli.table import Table


def table(words: str = "550 no such user") -> Table:
    made = Table("email", "count", "words", right=[1])
    made.add("0198c2f4-0000", 7, words)
    made.add("0198c2f4-0001", 1000, "-")
    return made


def test_columns_stand_below_their_heading() -> None:
    assert table().lines() == [
        "email           count   words",
        "─" * 40,
        "0198c2f4-0000       7   550 no such user",
        "0198c2f4-0001    1000   -",
    ]


def test_words_are_wrapped_where_the_terminal_is_narrow() -> None:
    assert table().lines(36)[2:] == [
        "0198c2f4-0000       7   550 no such",
        "                        user",
        "0198c2f4-0001    1000   -",
    ]


def test_no_word_is_cut_for_a_terminal_that_is_too_narrow_for_it() -> None:
    assert table().lines(20) == table().lines()


def test_wide_characters_take_two_places() -> None:
    assert table("日本 x").lines(29)[2:4] == ["0198c2f4-0000       7   日本", "                        x"]


def test_what_would_move_a_terminal_is_shown_as_a_mark() -> None:
    assert table("\x1b[31mred\n").lines()[2].endswith("\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}")


def test_without_a_heading_there_are_rows_alone() -> None:
    made = Table()
    made.add("email", "0198c2f4")
    made.add("status", "failed")

    assert made.lines() == ["email    0198c2f4", "status   failed"]
