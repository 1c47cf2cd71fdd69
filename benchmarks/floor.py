"""Measures the floor, which is the cost of an email if each unavoidable part runs alone, and the extra cost of the
whole chain.

The chain is measured first: `dispatcher run` with a backlog, as in run.py. The chain's metrics show its batch sizes.
Then each part runs alone at these sizes, with the same libraries, statements, servers and double: publish with
confirms, consume and ack, lease, send, record. Chain and parts alternate over the repetitions; medians are shown.

The overhead is given twice. By the clock: the chain's elapsed time per email, compared with the sum of the parts. Each
part runs in one process. This overhead determines emails per second. With one worker, the chain and the parts use
the same cores and the same number of sending processes. By CPU: the CPU of all our processes, PostgreSQL and RabbitMQ,
compared with the sum of the parts. This overhead limits a host, and parallel work does not reduce it.

A process takes more CPU while other processes evict its data from the caches. The chain runs next to all servers and
the double, but a part alone runs next to only one server or the double. So all parts are also run at the same time, by
one process. The extra cost above the floor is then the machine's share of the overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/floor.py`

from benchmarks.capacity import Figures, measure, server_pids
from benchmarks.doubles import Double, running_double
from benchmarks.figures import Spread
from benchmarks.floor_parts import ELAPSED, PARTS, Places, Sizes, measure_alone, measure_together
from benchmarks.machine import described, machine, versions
from benchmarks.rig import Case, database, drafts, passing_topology
from benchmarks.run import FAILED, INTERRUPTED, WIDTH, memory_folder, terminated
from dispatcher import enqueue_many
from dispatcher.config import load
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.errors import DispatcherError
from dispatcher.store.connections import connected

OURS: Final = ("worker", "relay", "monitor", "parent")
SERVERS: Final = ("postgresql", "rabbitmq")
DOUBLE: Final = "double"
IN_FLIGHT: Final = 64
NAME: Final = "floor.jsonl"
TARGET: Final = 0.25
_FIGURES: Final = ("client", *SERVERS, DOUBLE, ELAPSED)


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of the chain, and of its parts at the chain's sizes.

    Attributes:
        alone: For each part, microseconds per email: CPU by process, and elapsed time.
        together: The same figures, with all parts running at the same time.
    """

    chain: Figures
    sizes: Sizes
    alone: Mapping[str, Mapping[str, float]]
    together: Mapping[str, float]

    @property
    def chain_us(self) -> dict[str, float]:
        """The chain's cost per email: CPU by process, and elapsed time."""
        used = self.chain.cpu_us
        return {
            "client": sum(used.get(part, 0.0) for part in OURS),
            **{name: used[name] for name in (*SERVERS, DOUBLE)},
            ELAPSED: 1e6 / self.chain.emails_per_second,
        }

    @property
    def floor_us(self) -> dict[str, float]:
        """The sum of the parts, in the same form as `chain_us`."""
        return {name: sum(part[name] for part in self.alone.values()) for name in _FIGURES}


def main() -> int:
    """The command line; returns the exit code."""
    options = _options()
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, terminated)
    try:
        turns, facts = _turns(options, console)
    except (DispatcherError, RuntimeError, psycopg.Error) as error:
        console.print(f"Not measured: {error}", style="red", markup=False)
        return FAILED
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        return INTERRUPTED
    lines = "".join(json.dumps({**asdict(turn), "machine": facts}) + "\n" for turn in turns)
    if options.out:
        _write(turns, facts, lines, options.out)
    if options.json:
        sys.stdout.write(lines)
    else:
        _print(turns, facts, Console(width=None if sys.stdout.isatty() else WIDTH))
    return 0


def _turns(options: argparse.Namespace, console: Console) -> tuple[list[Turn], dict[str, object]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    settings = (("DISPATCHER_BUNDLE_EMAILS", str(options.bundle)),) if options.bundle > 1 else ()
    case = Case("sendgrid", options.workers, options.emails, options.prefetch, settings=settings)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-", dir=memory_folder()) as doubles,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
        Progress(*columns, console=console) as bar,
    ):
        facts = {**machine(), **versions(servers)}
        if missing := set(SERVERS) - server_pids(servers).keys():
            raise RuntimeError(f"the CPU of {' and '.join(sorted(missing))} can be measured only for private servers")
        task = bar.add_task("chain and parts in turns", total=options.repeat)
        turns = []
        for number in range(options.repeat):
            turns.append(_turn(servers, case, options.bundle, Path(doubles) / str(number)))
            bar.advance(task)
    return turns, facts


def _turn(servers: Servers, case: Case, bundle: int, folder: Path) -> Turn:
    with database(servers) as url:
        chain = measure(servers, case, folder / "chain", url)
    sizes = Sizes(
        prefetch=case.prefetch or load({}).prefetch,
        lease_batch=max(1, round(chain.lease_batch or 1)),
        record_batch=max(1, round(chain.record_batch or 1)),
        in_flight=IN_FLIGHT,
        bundle=bundle,
    )
    with running_double("sendgrid", folder / "parts") as double, contextlib.ExitStack() as stack:
        places, other, third = (stack.enter_context(_places(servers, double)) for _ in range(3))
        for one in (places, other):
            _enqueue(one, case.emails)
        alone = uvloop.run(measure_alone(places, sizes, case.emails))
        enqueue = partial(_enqueue, third, case.emails)
        together = uvloop.run(measure_together(other, third, sizes, case.emails, enqueue))
    return Turn(chain, sizes, alone, together)


@contextlib.contextmanager
def _places(servers: Servers, double: Double) -> Iterator[Places]:
    assert double.pid is not None
    with database(servers) as url, passing_topology(servers) as topology:
        yield Places(
            database_url=url,
            amqp_url=servers.amqp_url,
            exchange=topology.exchange,
            queue=topology.queue,
            sendgrid_url=double.environment["DISPATCHER_SENDGRID_HOST"],
            ca_file=double.ca_file,
            roots={**server_pids(servers), DOUBLE: double.pid},
        )


def _enqueue(places: Places, emails: int) -> None:
    with connected(places.database_url) as connection:
        enqueue_many(connection, drafts(emails, secrets.token_hex(4)))


def overhead_by_cpu(chain_us: Mapping[str, float], floor_us: Mapping[str, float]) -> float:
    """The chain's extra CPU as a share of the floor's CPU, both without the double's CPU."""
    return cpu_sum(chain_us) / cpu_sum(floor_us) - 1


def overhead_by_the_clock(chain_us: Mapping[str, float], floor_us: Mapping[str, float]) -> float:
    """The chain's extra elapsed time per email, as a share of the sum of its parts."""
    return chain_us[ELAPSED] / floor_us[ELAPSED] - 1


def read_turns(folder: Path) -> list[Turn]:
    """The turns that an earlier run wrote with --out."""
    turns = []
    for line in (folder / NAME).read_text().splitlines():
        record = json.loads(line)
        chain = record["chain"]
        figures = Figures(**{**chain, "case": Case(**chain["case"])})
        turns.append(Turn(figures, Sizes(**record["sizes"]), record["alone"], record["together"]))
    return turns


def cpu_sum(used: Mapping[str, float]) -> float:
    """The CPU of all processes but the double."""
    return used["client"] + sum(used[name] for name in SERVERS)


def _print(turns: Sequence[Turn], facts: dict[str, Any], console: Console) -> None:
    table = Table(title="Microseconds per email: CPU (user and system), and elapsed time. Medians of the turns")
    for heading in ("", "our processes", *SERVERS, "sum", DOUBLE, ELAPSED):
        table.add_column(heading, justify="right" if heading else "left")
    for part in PARTS:
        _add(table, part, medians([turn.alone[part] for turn in turns]))
    table.add_section()
    floor, chain = medians([turn.floor_us for turn in turns]), medians([turn.chain_us for turn in turns])
    together = medians([turn.together for turn in turns])
    _add(table, "floor: their sum", floor)
    _add(table, "all parts at the same time", together)
    _add(table, "chain", chain)
    table.add_section()
    for name, below in (("chain over floor", floor), ("chain over all together", together)):
        shares = [f"{chain[one] / below[one] - 1:+.0%}" for one in ("client", *SERVERS)]
        elapsed = f"{overhead_by_the_clock(chain, below):+.0%}"
        table.add_row(name, *shares, f"{overhead_by_cpu(chain, below):+.0%}", "", elapsed)
    console.print(table)
    for words in (*_verdict(turns), described(facts)):
        console.print(words)


def _verdict(turns: Sequence[Turn]) -> Iterator[str]:
    floor, chain = medians([turn.floor_us for turn in turns]), medians([turn.chain_us for turn in turns])
    readings = (
        ("By the clock the chain takes", overhead_by_the_clock),
        ("By CPU it costs", overhead_by_cpu),
    )
    for words, over in readings:
        spread = Spread.of(over(turn.chain_us, turn.floor_us) for turn in turns)
        word = "within" if (median := over(chain, floor)) <= TARGET else "above"
        yield (
            f"{words} {median:+.0%} over its floor ({spread.lowest:+.0%} – {spread.highest:+.0%}), {word} the "
            f"limit of {TARGET:.0%}."
        )
    rate = statistics.median(turn.chain.emails_per_second for turn in turns)
    yield f"{turns[0].chain.case.workers} workers, {rate:,.0f} emails/s."
    sizes = turns[-1].sizes
    yield (
        f"Batches as in the chain: {sizes.lease_batch} leased, {sizes.record_batch} recorded and acked together, "
        f"prefetch {sizes.prefetch}, {sizes.bundle} to a message; {sizes.in_flight} concurrent requests."
    )


def _add(table: Table, name: str, used: Mapping[str, float]) -> None:
    figures = [used["client"], *(used[server] for server in SERVERS), cpu_sum(used), used[DOUBLE], used[ELAPSED]]
    table.add_row(name, *(f"{figure:,.0f}" for figure in figures))


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(row[name] for row in rows) for name in _FIGURES}


def _write(turns: Sequence[Turn], facts: dict[str, Any], lines: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(lines)
    with (folder / "floor.txt").open("w") as file:
        _print(turns, facts, Console(file=file, width=WIDTH))


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks/floor.py",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--emails", type=int, default=10_000, metavar="N", help="per repetition; default: 10000")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="workers of the chain; default: 2")
    parser.add_argument("--prefetch", type=int, metavar="N", help="default: the product's")
    parser.add_argument("--bundle", type=int, default=1, metavar="N", help="emails per message; default: 1")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write floor.jsonl and floor.txt there")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per turn, and no table")
    options = parser.parse_args()
    if min(options.emails, options.workers, options.repeat, options.bundle) < 1:
        parser.error("--emails, --workers, --repeat and --bundle must be whole numbers of at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
