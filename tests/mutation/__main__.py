"""Plants faults in a copy of the product, and shows which of them the tests notice.

\b
    ./run mutate --sample 100 --seed 1      a sample of small faults, drawn from all rooms
    ./run mutate --room relay               the same number, from one room
    ./run mutate --faults                   the planted faults of tests/mutation/faults

First, all tests run once with coverage, to learn which tests execute which line; later runs keep this knowledge until
the product or a test changes. Each fault then meets the tests that execute its lines, those of its own room first.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

import click

from dispatcher.dev.servers import private_servers
from tests.conftest import SERVERS_VARIABLE
from tests.mutation.mutants import ROOMS, all_mutants
from tests.mutation.tests_by_line import TestsByLine, record

CHECKOUT: Final = Path(__file__).parents[2]
FAULTS: Final = Path(__file__).parent / "faults"
HANG_SECONDS: Final = 200.0
"""If no test ends for this time, the fault counts as noticed. A test waits at most half as long for a condition."""
STOP_SECONDS: Final = 30.0
_PYTEST: Final = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")
_COPIED: Final = ("benchmarks", "deploy", "dispatcher", "docs", "examples", "requirements", "sql", "tests")
_HUNK: Final = re.compile(r"^@@ -(\d+)(?:,(\d+))? ", re.MULTILINE)
_PATCHED: Final = re.compile(r"^--- a/(\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    file: str
    text: str
    tests: list[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said. `noticed_by` is the first test that failed; empty if none did."""

    fault: str
    noticed_by: str
    tests: int
    seconds: float


@click.command("./run mutate", context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--sample", type=click.IntRange(1), default=100, show_default=True, help="How many faults.")
@click.option("--seed", type=click.IntRange(0), help="The same seed draws the same faults.  [default: random]")
@click.option("--room", "rooms", type=click.Choice(list(ROOMS)), multiple=True, help="Repeatable.  [default: all]")
@click.option("--faults", is_flag=True, help="Plant the named faults instead of a sample.")
@click.option("--jobs", type=click.IntRange(1, 16), default=os.cpu_count() or 1, help="At the same time.")
def main(*, sample: int, seed: int | None, rooms: Sequence[str], faults: bool, jobs: int) -> None:
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    data_file = _known_tests()
    tests_by_line = TestsByLine(CHECKOUT, data_file)
    chosen = list(_named(tests_by_line) if faults else _drawn(tests_by_line, rooms or list(ROOMS), sample, seed))
    click.echo(f"{len(chosen)} faults{'' if faults else f', seed {seed}'}", err=True)
    verdicts = []
    with _benches(jobs) as judge, ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(judge, fault) for fault in chosen]
        for number, future in enumerate(waiting, 1):
            try:
                verdict = future.result()
            except KeyboardInterrupt:  # the runs of pytest get the signal, too
                pool.shutdown(cancel_futures=True)
                raise
            verdicts.append(verdict)
            click.echo(
                f"{number:4} of {len(chosen)}  {'noticed ' if verdict.noticed_by else 'SURVIVED'}"
                f" {verdict.seconds:5.0f} s  {verdict.tests:4} tests  {verdict.fault}  {verdict.noticed_by}",
                err=True,
            )
    noticed = sum(bool(verdict.noticed_by) for verdict in verdicts)
    click.echo(f"{noticed} of {len(verdicts)} noticed ({100 * noticed / len(verdicts):.0f} %)")
    for verdict in verdicts:
        if not verdict.noticed_by:
            click.echo(f"  survived: {verdict.fault}")
    sys.exit(faults and noticed < len(verdicts))


def _known_tests() -> Path:
    """What is known of the tests' lines; recorded anew after a change."""
    folder = Path(os.environ.get("DISPATCHER_CACHE_DIR", CHECKOUT / "var")) / "mutation"
    state = _git("rev-parse", "HEAD:dispatcher", "HEAD:sql", "HEAD:tests").split()
    if changes := _git("diff", "HEAD", "--", "dispatcher", "sql", "tests"):
        state.append(hashlib.sha256(changes.encode()).hexdigest())
    data_file = folder / "-".join(word[:12] for word in state) / "lines"
    if not data_file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        data_file.parent.mkdir(parents=True)
        click.echo("Running all tests once with coverage, to learn which tests execute which line", err=True)
        record(CHECKOUT, data_file, [])
    return data_file


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout


def _drawn(tests_by_line: TestsByLine, rooms: Sequence[str], sample: int, seed: int) -> Iterator[Fault]:
    """A sample with the same share of each room, as far as the rooms have so many faults."""
    by_room = [list(all_mutants(CHECKOUT, [room])) for room in rooms]
    chance = random.Random(seed)
    for mutants in by_room:
        chance.shuffle(mutants)
    drawn = [mutant for group in zip_longest(*by_room) for mutant in group if mutant][:sample]
    for mutant in drawn:
        yield Fault(str(mutant), mutant.file, mutant.text, tests_by_line.tests_of(mutant.file, mutant.lines))


def _named(tests_by_line: TestsByLine) -> Iterator[Fault]:
    """The faults of the patches. Each patch changes one file."""
    for patch in sorted(FAULTS.glob("*.patch")):
        head, *hunks = re.split(r"^(?=@@ )", patch.read_text(), flags=re.MULTILINE)
        (file,) = _PATCHED.findall(head)
        tests = [test for hunk in hunks for test in tests_by_line.tests_of(file, list(_changed(hunk)))]
        yield Fault(patch.stem, file, _patched(file, patch), list(dict.fromkeys(tests)))


def _patched(file: str, patch: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file
        copy.parent.mkdir(parents=True)
        shutil.copyfile(CHECKOUT / file, copy)
        subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
        return copy.read_text(encoding="utf-8")


def _changed(hunk: str) -> Iterator[int]:
    """The old numbers of the lines that a hunk removes, or next to which it adds lines."""
    found = _HUNK.match(hunk)
    assert found
    number = int(found[1])
    for line in hunk.splitlines()[1:]:
        if line.startswith("-"):
            yield number
        elif line.startswith("+"):
            yield max(1, number - 1)
        number += not line.startswith("+")


@contextmanager
def _benches(jobs: int) -> Iterator[Callable[[Fault], Verdict]]:
    """Copies of the checkout, each used by one thread at a time, and servers for all of them."""
    with tempfile.TemporaryDirectory(prefix="dispatcher-mutation-") as folder:
        free = [_Bench(Path(folder) / f"copy{number}") for number in range(jobs)]
        guard = threading.Lock()
        place = Path("/dev/shm") if Path("/dev/shm").is_mount() else Path(folder)
        with (
            tempfile.TemporaryDirectory(prefix="dispatcher-mutation-", dir=place) as data,
            private_servers(Path(data) / "servers", postgres_settings={"full_page_writes": "off"}) as servers,
        ):
            shared = json.dumps({**asdict(servers), "folder": str(servers.folder)})

            def judge(fault: Fault) -> Verdict:
                with guard:
                    bench = free.pop()
                try:
                    return bench.judge(fault, shared)
                finally:
                    free.append(bench)

            yield judge


class _Bench:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds = 0
        folder.mkdir()
        for entry in CHECKOUT.iterdir():
            if entry.name in _COPIED:
                shutil.copytree(entry, folder / entry.name, symlinks=True)
            elif entry.is_file():
                shutil.copy2(entry, folder)
        # Otherwise the installation finds the package dispatcher.sql, in the checkout.
        (folder / "dispatcher/sql").symlink_to("../sql")

    def judge(self, fault: Fault, servers: str) -> Verdict:
        began_at = time.monotonic()
        with self._planted(fault):
            noticed_by = self._first_failure(fault.tests, servers)
        return Verdict(fault.name, noticed_by, len(fault.tests), time.monotonic() - began_at)

    @contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        try:
            self._write(fault.file, fault.text)
            yield
        finally:
            self._write(fault.file, (CHECKOUT / fault.file).read_text(encoding="utf-8"))

    def _write(self, file: str, text: str) -> None:
        """Write a file with a time that it never had, because Python compares times in whole seconds."""
        path = self._folder / file
        path.write_text(text, encoding="utf-8")
        self._seconds += 1
        now = time.time() + self._seconds
        os.utime(path, (now, now))

    def _first_failure(self, tests: Sequence[str], servers: str) -> str:
        chosen = self._folder / "chosen-tests"
        chosen.write_text("\n".join(tests))
        out = self._folder / "printed"
        with out.open("wb") as printed:
            process = subprocess.Popen(
                [*_PYTEST, f"@{chosen}"],
                cwd=self._folder,
                env={**os.environ, SERVERS_VARIABLE: servers},
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
        while not _has_ended(process, HANG_SECONDS):
            if time.time() - out.stat().st_mtime > HANG_SECONDS:  # each test that ends prints a dot
                process.send_signal(signal.SIGINT)  # pytest ends the programs under test
                if not _has_ended(process, STOP_SECONDS):
                    process.kill()
                    process.wait()
                return f"a test hangs for {HANG_SECONDS:g} s"
        said = out.read_text(errors="replace")
        if process.returncode == 0:
            return ""
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        return failed[0] if failed else f"exit {process.returncode}: {said[-200:]}"


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


if __name__ == "__main__":
    main(prog_name="./run mutate")
