"""File extensions are read as the recipient's system reads them."""

from __future__ import annotations

import pytest

from dispatcher.domain.outgoing import endings_of


@pytest.mark.parametrize(
    "name",
    [
        "a.exe",
        "A.EXE",
        ".exe",
        "a.pdf.exe",
        "a.exe.",
        "a.exe. . ",
        "a.exe\u00a0\u3000",
        "a.exe\u2026",
        "a\uff0eexe",
        "a\ufe52exe",
        "a\u2024exe",
        "a.\uff45\uff58\uff45",
        "a.\U0001d41e\U0001d431\U0001d41e",
        "a.e\u200bxe",
        "a.exe\u200d",
        "a.exe\u00ad",
        "a.\ufeffexe",
        "a.e\ufe0fxe",
        "a.exe\U000e0041",
        "a.exe\u3164",
        "a.exe:b.pdf",
        "a.exe::$DATA",
        "a.pdf:b.exe",
        "C:a.exe",
        "a.exe\uff1ab.pdf",
        "a.exe :b",
    ],
)
def test_an_extension_is_found_however_it_is_written(name: str) -> None:
    assert "exe" in endings_of(name)


@pytest.mark.parametrize(
    "name", ["exe", "a.exe.pdf", "exe.pdf", "a.e xe", "a", "", "Fwd: exe", "\u0435\u0445\u0435.pdf"]
)
def test_other_text_is_not_an_extension(name: str) -> None:
    assert "exe" not in endings_of(name)
