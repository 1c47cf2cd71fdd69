"""Checks every import against the table of layers in ARCHITECTURE.md.

A room is a package or module directly under `dispatcher/`. A room may import itself and rooms on lower floors, but no
other room on its own floor or above. Imports inside functions and under TYPE_CHECKING count. Files must not import each
other in a cycle, not even within a room.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

import pytest

FACADE: Final = "dispatcher/__init__"

FLOORS: Final = (
    # The lowest floor comes first.
    {"errors", "version", "sql"},
    {"domain"},
    {"config"},
    {"transport"},  # how an email leaves a process
    {"telemetry"},
    {"host"},  # what the processes of one host share
    {"store", "broker", "providers"},  # these do not import each other
    {"routing", "events"},
    {"worker", "relay", "recovery", "producers"},
    {"monitor", "contrib"},  # contrib: what other frameworks call
    {FACADE},  # what an application imports
    {"supervisor", "ops"},
    {"actions"},
    {"client"},
    {"admission"},  # what the API and the SMTP server share
    {"api", "smtp_door"},
    {"dev"},
    {"cli"},
    {"__main__"},  # `python -m dispatcher`
)

CLIENTS: Final[tuple[tuple[set[str], set[str]], ...]] = (
    ({"store"}, {"psycopg", "psycopg_pool"}),
    ({"broker"}, {"pika"}),
    ({"providers"}, {"sendgrid", "python_http_client"}),
    ({"providers", "events"}, {"boto3", "botocore"}),
    ({"events"}, {"cryptography"}),
    ({"monitor"}, {"aiosmtplib"}),
    ({"contrib"}, {"django"}),
    ({"client"}, {"pyreqwest", "aiohttp", "httpx", "requests", "urllib3"}),
    ({"transport"}, {"aiohappyeyeballs"}),
    # Only tests use it, to verify our signatures.
    (set(), {"standardwebhooks"}),
    # The transport asks for the environment's proxies; dev downloads private servers and waits for them.
    ({"transport", "dev"}, {"http.client", "urllib.request"}),
    ({"dev", "smtp_door"}, {"aiosmtpd"}),
    ({"api", "client"}, {"msgspec"}),
    # These packages come with the extra `api`. The base install works without this extra.
    ({"api"}, {"starlette", "uvicorn"}),
    # Only an example uses it.
    (set(), {"fastapi"}),
    ({"telemetry", "monitor"}, {"prometheus_client"}),
    ({"host"}, {"h11"}),
    # These packages come with the extra `oidc`.
    ({"api"}, {"authlib", "joserfc"}),
    # This package comes with the extra `otel`.
    ({"telemetry"}, {"opentelemetry"}),
    # No room may import smtplib, because it blocks, and hides the phase in which a request failed.
    (set(), {"smtplib"}),
)
"""The libraries for input and output, and the only rooms that may import each of them."""

TYPES_ONLY: Final = {("producers", "psycopg")}
"""Imports that are allowed only under TYPE_CHECKING: producers execute statements on the caller's connection, so the
caller has imported psycopg."""

STANDARD_LIBRARY_ONLY: Final = {"errors", "version", "domain"}
INPUT_AND_OUTPUT: Final = {
    *("asyncio", "ftplib", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "select", "shutil"),
    *("signal", "smtplib", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "urllib"),
}


class Import(NamedTuple):
    where: str
    """File and line, for the error message."""
    file: str
    room: str
    module: str
    for_types: bool
    """Whether the import is under TYPE_CHECKING."""


FOLDER: Final = Path(__file__).parent.parent / "dispatcher"
ROOMS: Final = sorted(
    {FACADE}
    | {path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    | {path.name for path in FOLDER.iterdir() if path.is_dir() and any(path.glob("**/*.py"))}
)
FLOOR_OF: Final = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
GUARDS: Final = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def room_of(module: str) -> str:
    room = f"{module}.".split(".")[1]
    return room if room in ROOMS or room in FLOOR_OF else FACADE


def imports_of(path: Path) -> Iterator[Import]:
    parts = ("dispatcher", *path.relative_to(FOLDER).with_suffix("").parts)
    room = FACADE if parts == ("dispatcher", "__init__") else parts[1]
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    guards = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) in GUARDS]
    for_types = {id(node) for guard in guards for statement in guard.body for node in ast.walk(statement)}
    for node in nodes:
        for module in _modules(node, parts[:-1]):
            where = f"{'/'.join(parts)}.py:{getattr(node, 'lineno', 0)}"
            yield Import(where, ".".join(parts).removesuffix(".__init__"), room, module, id(node) in for_types)


def _modules(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """The modules that a statement imports; `from package import name` may import `package.name`."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = ".".join(package[: len(package) - level + 1]) if level else ""
            source = ".".join(filter(None, (base, module)))
            return [f"{source}.{alias.name}" for alias in names]
        case _:
            return []


def within(module: str, library: str) -> bool:
    return f"{module}.".startswith(f"{library}.")


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [found for path in sorted(FOLDER.rglob("*.py")) for found in imports_of(path)]


def test_every_room_has_one_floor() -> None:
    assert [room for room in ROOMS if room not in FLOOR_OF] == []
    assert sum(len(rooms) for rooms in FLOORS) == len(FLOOR_OF)


def goes_upward(found: Import) -> str | None:
    room = room_of(found.module)
    if not within(found.module, "dispatcher") or room == found.room:
        return None
    return f"{room}, which is not below it" if FLOOR_OF.get(room, 99) >= FLOOR_OF.get(found.room, -1) else None


def is_of_another_room(found: Import) -> str | None:
    """Each library for input and output is imported only in its rooms."""
    for rooms, libraries in CLIENTS:
        for library in libraries:
            if within(found.module, library) and found.room not in rooms:
                return None if found.for_types and (found.room, library) in TYPES_ONLY else library
    return None


def is_foreign(found: Import) -> str | None:
    """Errors and the domain import only the standard library, and tables of phone numbers."""
    known = sys.stdlib_module_names | {"dispatcher", "phonenumbers"}
    is_known = found.room not in STANDARD_LIBRARY_ONLY or found.module.partition(".")[0] in known
    return None if is_known else found.module


def does_input_or_output(found: Import) -> str | None:
    return found.module if found.room == "domain" and found.module.partition(".")[0] in INPUT_AND_OUTPUT else None


@pytest.mark.parametrize("rule", [goes_upward, is_of_another_room, is_foreign, does_input_or_output])
def test_no_import_breaks_a_rule(imports: list[Import], rule: Callable[[Import], str | None]) -> None:
    broken = [f"{found.where}: {found.room} may not import {what}" for found in imports if (what := rule(found))]

    assert not broken, "\n".join(broken)


def test_no_files_import_each_other_in_a_circle(imports: list[Import]) -> None:
    files = {found.file for found in imports}
    graph: dict[str, set[str]] = {}
    for found in imports:
        # `from package import name` imports the file `package.name`, or else a name from `package`.
        imported = found.module if found.module in files else found.module.rpartition(".")[0]
        if imported in files and imported != found.file:
            graph.setdefault(found.file, set()).add(imported)

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
