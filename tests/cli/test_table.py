"""Tables are aligned, wrapped to the terminal's width, and free of control characters."""

from __future__ import annotations

from datetime import datetime

from dispatcher.cli.table import Styled, Table, columns_of, side_by_side


def table(words: str = "550 no such user") -> Table:
    made = Table("email", "count", "words", right=[1])
    made.add("0198c2f4-0000", 7, words)
    made.add("0198c2f4-0001", 1000, "-")
    return made


def test_columns_are_aligned_with_their_heading() -> None:
    assert table().lines() == [
        "email           count   words",
        "─" * 40,
        "0198c2f4-0000       7   550 no such user",
        "0198c2f4-0001    1000   -",
    ]


def test_cells_are_wrapped_on_a_narrow_terminal() -> None:
    assert table().lines(36)[2:] == [
        "0198c2f4-0000       7   550 no such",
        "                        user",
        "0198c2f4-0001    1000   -",
    ]


def test_rows_become_records_if_the_terminal_is_too_narrow_for_the_columns() -> None:
    assert table().lines(25) == [
        "email   0198c2f4-0000",
        "count   7",
        "words   550 no such user",
        "",
        "email   0198c2f4-0001",
        "count   1000",
    ]


def test_a_word_is_not_broken_even_if_the_terminal_is_too_narrow() -> None:
    assert "email   0198c2f4-0000" in table().lines(20)


def test_wide_characters_take_two_columns() -> None:
    assert table("日本 x").lines(29)[2:4] == ["0198c2f4-0000       7   日本", "                        x"]


def test_control_characters_become_replacement_characters() -> None:
    assert table("\x1b[31mred\n").lines()[2].endswith("\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}")


def test_a_very_long_text_is_cut_so_that_the_other_rows_stay_short() -> None:
    lines = table("x" * 1_000_000).lines()

    assert max(map(len, lines)) < 5000


def test_a_table_without_a_heading_has_only_rows() -> None:
    made = Table()
    made.add("email", "0198c2f4")
    made.add("status", "failed")

    assert made.lines() == ["email    0198c2f4", "status   failed"]


def test_styles_add_escape_sequences_and_no_width() -> None:
    made = Table()
    made.add(Styled("✗", "red"), "webhook", style="bold")
    made.add("✓", "mail")

    assert made.lines() == ["✗   webhook", "✓   mail"]
    assert made.lines(coloured=True) == ["\x1b[31m✗\x1b[0m   \x1b[1mwebhook\x1b[0m", "✓   mail"]


def test_words_of_the_fold_column_are_broken_on_a_narrow_terminal() -> None:
    made = Table("variable", "value", fold=1)
    made.add("DISPATCHER_AMQP_URL", "amqp://" + "x" * 60)

    assert max(map(columns_of, made.lines(60))) <= 60


def test_none_is_a_dash_an_instant_has_seconds_and_a_gap_is_an_empty_line() -> None:
    made = Table()
    made.add(None, datetime(2026, 1, 2, 3, 4, 5).astimezone())
    made.add_gap()
    made.add("", "later")

    assert made.lines() == ["-   2026-01-02 03:04:05", "", "    later"]


def test_tables_are_side_by_side_if_they_fit_and_otherwise_one_below_the_other() -> None:
    left, right = Table(), Table()
    left.add("sent", 1)
    left.add("failed", 2)
    right.add("worker")

    assert side_by_side([left, right], 80, coloured=False) == ["sent     1    worker", "failed   2"]
    assert side_by_side([left, right], 12, coloured=False) == ["sent     1", "failed   2", "", "worker"]
