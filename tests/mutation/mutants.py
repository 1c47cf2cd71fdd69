"""Small faults that can be planted in the product: one changed operator, constant, condition or statement each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOMS: Final = {
    "worker": ("dispatcher/worker/*.py",),
    "relay": ("dispatcher/relay/*.py",),
    "recovery": ("dispatcher/recovery/*.py",),
    "routing": ("dispatcher/routing/*.py",),
    "ledger": ("dispatcher/host/ledger*.py",),
    "store": (
        *(f"sql/queries/{name}.sql" for name in ("dead", "enqueue", "events", "held", "lease", "record", "relay")),
        *(f"sql/queries/{name}.sql" for name in ("replay", "settle", "timing", "unsent", "waiting")),
    ),
}
"""The files of each room. `worker/in_flight_email.py` holds the table of transitions."""

_Node = ast.expr | ast.stmt

_COMPARED: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
_SILENT: Final = re.compile(r"\b(get_log\(\)|_log)\.|^\s*(super\(\)|self)\.__|__slots__")
_CONDITION: Final = re.compile(r"^\s+(?:and|where) (?=\S)")
_SQL: Final = (
    (re.compile(r" < "), " <= "),
    (re.compile(r" <= "), " < "),
    (re.compile(r" > "), " >= "),
    (re.compile(r" >= "), " > "),
    (re.compile(r" is null\b"), " is not null"),
    (re.compile(r" is not null\b"), " is null"),
    (re.compile(r" \+ 1\b"), " + 2"),
    (re.compile(r" (<>|not in) "), " = "),
    (re.compile(r"\btrue\b"), "false"),
    (re.compile(r"\bfalse\b"), "true"),
    (re.compile(r" skip locked\b"), ""),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault of one file: its path in the checkout, the changed lines, the change for people, and the new text."""

    file: str
    lines: range
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.lines.start} {self.what}"


def all_mutants(checkout: Path, rooms: Iterable[str]) -> Iterator[Mutant]:
    """Every mutant of these rooms, in a fixed order."""
    for room in rooms:
        for pattern in ROOMS[room]:
            for path in sorted(checkout.glob(pattern)):
                text = path.read_text(encoding="utf-8")
                mutants = _of_python if path.suffix == ".py" else _of_sql
                yield from mutants(str(path.relative_to(checkout)), text)


def _of_python(file: str, text: str) -> Iterator[Mutant]:
    source = _Source(file, text)
    for node in _nodes(ast.parse(text)):
        if isinstance(node, ast.expr):
            yield from _of_operators(source, node)
            yield from _of_values(source, node)
        elif isinstance(node, ast.stmt):
            yield from _of_statements(source, node)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and (words := source.words(node.test)) != "True":
            yield source.mutant(node.test, f"(not ({words}))", "the condition was negated")


class _Source:
    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self._octets = text.encode()
        self._starts = [0]
        for line in self._octets.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def words(self, node: _Node) -> str:
        return self._octets[slice(*self._place(node))].decode()

    def mutant(self, node: _Node, new: str, what: str) -> Mutant:
        return self._changed(node, *self._place(node), new, what)

    def between(self, node: _Node, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutant:
        """Replace an operator. Around it, there may be parentheses and ends of lines."""
        start, end = self._place(left)[1], self._place(right)[0]
        gap = self._octets[start:end].decode()
        changed = re.sub(rf"(?<![\w<>=!]){re.escape(old)}(?![\w<>=])", new, gap, count=1)
        return self._changed(node, start, end, changed, f"`{old}` became `{new}`")

    def _place(self, node: _Node) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _changed(self, node: _Node, start: int, end: int, new: str, what: str) -> Mutant:
        assert node.end_lineno is not None
        text = (self._octets[:start] + new.encode() + self._octets[end:]).decode()
        return Mutant(self._file, range(node.lineno, node.end_lineno + 1), what, text)


def _of_operators(source: _Source, node: ast.expr) -> Iterator[Mutant]:
    if isinstance(node, ast.Compare):
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            yield source.between(node, left, right, *_COMPARED[type(operator)])
    elif isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            yield source.between(node, left, right, old, new)
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        yield source.between(node, node.left, node.right, *_COMPUTED[type(node.op)])


def _of_values(source: _Source, node: ast.expr) -> Iterator[Mutant]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.mutant(node, source.words(node).removeprefix("not").lstrip(), "`not` was removed")
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        new = str(node.value + 1) if type(node.value) is int else str(not node.value)
        yield source.mutant(node, new, f"`{node.value!r}` became `{new}`")


def _of_statements(source: _Source, node: ast.stmt) -> Iterator[Mutant]:
    is_effect = (
        isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Break | ast.Continue)
        or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield))
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
    )
    if is_effect:
        yield source.mutant(node, "pass", f"`{_short(source.words(node))}` was removed")
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield source.mutant(node, "return None", "nothing was returned")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of functions' bodies and of tables, without annotations, assertions and what is only logged."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.JoinedStr):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Expr) and _SILENT.search(ast.unparse(node)):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                yield child
                yield from _nodes(child)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from _nodes(ast.Expression(node.value))
        else:
            yield node
            yield from _nodes(node)


def _of_sql(file: str, text: str) -> Iterator[Mutant]:
    lines = text.splitlines(keepends=True)

    def mutant(number: int, line: str, what: str) -> Mutant:
        return Mutant(file, range(number, number + 1), what, "".join([*lines[: number - 1], line, *lines[number:]]))

    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("--"):
            continue
        found = _CONDITION.match(line)
        condition = line[found.end() :].rstrip() if found else ""
        if found and condition.count("(") == condition.count(")") and not condition.endswith("("):
            yield mutant(number, f"{line[: found.end()]}true\n", f"`{_short(condition)}` was removed")
        for pattern, new in _SQL:
            for match in pattern.finditer(line):
                changed = line[: match.start()] + new + line[match.end() :]
                yield mutant(number, changed, f"`{match.group().strip()}` became `{new.strip()}` in `{_short(line)}`")


def _short(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
