"""Plain tables: aligned, as narrow as the terminal where words allow it, and obeyed by no terminal."""

from __future__ import annotations

from datetime import datetime

from dispatcher.cli.table import Styled, Table, beside, columns_of


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


def test_styles_are_drawn_where_colours_are_wanted_and_widen_nothing() -> None:
    made = Table()
    made.add(Styled("✗", "red"), "webhook", style="bold")
    made.add("✓", "mail")

    assert made.lines() == ["✗   webhook", "✓   mail"]
    assert made.lines(coloured=True) == ["\x1b[31m✗\x1b[0m   \x1b[1mwebhook\x1b[0m", "✓   mail"]


def test_a_column_that_folds_is_cut_where_the_terminal_is_too_narrow_for_its_words() -> None:
    made = Table("variable", "value", fold=1)
    made.add("DISPATCHER_AMQP_URL", "amqp://" + "x" * 60)

    assert max(map(columns_of, made.lines(60))) <= 60


def test_nothing_and_instants_have_words_and_a_gap_is_an_empty_line() -> None:
    made = Table()
    made.add(None, datetime(2026, 1, 2, 3, 4, 5).astimezone())
    made.add_gap()
    made.add("", "later")

    assert made.lines() == ["-   2026-01-02 03:04:05", "", "    later"]


def test_tables_stand_side_by_side_where_they_fit_and_below_each_other_where_not() -> None:
    left, right = Table(), Table()
    left.add("sent", 1)
    left.add("failed", 2)
    right.add("worker")

    assert beside([left, right], 80, coloured=False) == ["sent     1    worker", "failed   2"]
    assert beside([left, right], 12, coloured=False) == ["sent     1", "failed   2", "", "worker"]
