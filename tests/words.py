"""Finds words that we do not use in docstrings, comments and documentation: `python -m tests.words [PATH...]`.

    python -m tests.words                  the count for each top-level folder; exit code 1 if one is above its limit
    python -m tests.words docs/api.md      each word, its line, and what to write instead

The words are idioms that a reader has to read twice, and synonyms of terms in CONTRIBUTING.md's glossary. The limit
keeps these words from coming back. It does not prove that a text is plain.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
MAX_PER_10_000: Final = 5.0
PAGES: Final = "README.md, …"
"""The pages at the top of the checkout count together."""
ADVICE: Final = {
    r"somebody(?:'s)?|nobody(?:'s)?": "name the actor: the operator, the relay, another transaction",
    r"who(?:m)?ever": "name the actor, and use two sentences",
    r"tells?|told": "say, report or print; for a request: ask or request",
    r"stands?|stood": "is, has, contains; a setting is set, a row has a status",
    r"hears?|heard|unheard": "receive, or reach",
    r"awaited": "say which process waits for what",
    r"of (?:which|whom)": "use two sentences",
    r"hence": "so",
    r"coalesces?|coalesced|coalescing": "bulk call: several emails per provider call",
    r"(?<!dead )(?<!dead-)letters?(?= (?:is|are|on|of the email))": "dead letter",
    r"at hand|in hand|of its own accord": "say what the process has, or drop it",
    r"a person|persons": "operator",
}
_WORD: Final = re.compile("|".join(rf"(?P<w{n}>\b(?:{words})\b)" for n, words in enumerate(ADVICE)), re.IGNORECASE)
_CITED: Final = re.compile(r"^```.*?^```|`[^`\n]*`|(?<![*\w])\*[^*\n]+\*(?![*\w])", re.MULTILINE | re.DOTALL)
"""Code and words in italics, which a page cites and which do not count."""
_SQL_COMMENT: Final = re.compile(r"--.*")


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a file: docstrings and comments, or a page without its code. Each passage has the number of its
    first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, _CITED.sub(lambda code: "\n" * code[0].count("\n"), text)
    elif path.suffix == ".sql":
        lines = enumerate(text.splitlines(), start=1)
        yield from ((number, found[0]) for number, line in lines if (found := _SQL_COMMENT.search(line)))
    else:
        yield from _docstrings(text)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and strings below constants and fields."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(words))):
                yield node.lineno, words


def find(path: Path) -> tuple[list[str], int]:
    found: list[str] = []
    count = 0
    for first_line, prose in passages(path):
        count += len(prose.split())
        for match in _WORD.finditer(prose):
            line = first_line + prose.count("\n", 0, match.start())
            advice = list(ADVICE.values())[int(str(match.lastgroup).removeprefix("w"))]
            found.append(f"{path}:{line}: {match[0]!r}: {advice}")
    return found, count


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.sql"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return [path for path in paths if (ROOT / path).exists()]


def main(arguments: Sequence[str]) -> int:
    """Prints the counts of all folders, or the words in the given files and folders; returns the exit code."""
    if arguments:
        places = [Path(each).resolve() for each in arguments]
        paths = [ROOT / path for path in tracked() if any((ROOT / path).is_relative_to(place) for place in places)]
        for each in (each for path in paths for each in find(path)[0]):
            print(each)
        return 0
    unused: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for path in tracked():
        found, count = find(ROOT / path)
        folder = path.parts[0] if len(path.parts) > 1 else PAGES
        unused[folder] += len(found)
        words[folder] += count
    rates = {folder: 10_000 * unused[folder] / max(words[folder], 1) for folder in sorted(words)}
    for folder, rate in rates.items():
        print(f"{folder:20} {unused[folder]:5} of {words[folder]:7,} words {rate:6.1f} per 10,000")
    is_above = max(rates.values()) > MAX_PER_10_000
    if is_above:
        print(f"Above {MAX_PER_10_000:g} per 10,000: `python -m tests.words FOLDER` names each word and the advice.")
    return int(is_above)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
