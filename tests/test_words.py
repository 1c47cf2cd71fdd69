"""`tests.words` finds the words that we do not use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.words import ADVICE, find

CODE = '''"""Nobody reads this.

It stands here.
"""

TOLD = "told"  # whoever reads

LIMIT = 3
"""A person decides."""


def whoever(told: str) -> None:
    """Says why."""
    print("nobody is told")
'''
PAGE = """# Heard

A dead letter; the letters a to z. `told` and *stands* are cited.

```
nobody
```

Emails, some of which wait.
"""
QUERY = """-- name: told
select told -- which nobody reads
"""


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("code.py", CODE, [(1, "Nobody"), (3, "stands"), (6, "whoever"), (9, "A person")]),
        ("page.md", PAGE, [(1, "Heard"), (9, "of which")]),
        ("query.sql", QUERY, [(1, "told"), (2, "nobody")]),
    ],
)
def test_words_are_found_in_prose_and_not_in_code(
    tmp_path: Path, name: str, text: str, words: list[tuple[int, str]]
) -> None:
    path = tmp_path / name
    path.write_text(text)

    found, count = find(path)

    assert sorted((each.line, each.word) for each in found) == words
    assert all(each.advice in ADVICE.values() for each in found)
    assert count > len(found)
