"""The floor: what an email costs if each unavoidable part is done alone, and how far above it the chain is.

The chain is measured first (`dispatcher run`, a backlog, as run.py does it), its batch sizes are taken from its own
metrics, and each part is then done alone at these sizes with the same libraries, statements, servers and double:
publish with confirms, consume and ack, lease, send, record. CPU is counted, not time, because CPU is what the chain
runs out of. The overhead is the chain's CPU per email (all of our processes, PostgreSQL, RabbitMQ) over the sum of the
parts. Chain and parts take turns over the repetitions; medians are shown.

A busy neighbour makes the same work cost more CPU where cores share caches or are hyperthreads: the chain runs beside
its servers and the double, a part beside one of them alone, so a little of the overhead is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/floor.py`

from benchmarks.capacity import Figures, measure, server_pids
from benchmarks.doubles import running_double
from benchmarks.figures import Spread
from benchmarks.floor_parts import PARTS, Costs, Places, Sizes, measure_parts
from benchmarks.machine import in_words, machine, versions
from benchmarks.rig import Case, database, drafts, passing_topology
from benchmarks.run import FAILED, INTERRUPTED, WIDTH, memory_folder, terminated
from dispatcher import enqueue_many
from dispatcher.config import load
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.errors import DispatcherError
from dispatcher.store.connections import connected

OURS: Final = ("worker", "relay", "monitor", "parent")
SERVERS: Final = ("postgresql", "rabbitmq")
IN_FLIGHT: Final = 64
NAME: Final = "floor.jsonl"
TARGET: Final = 0.25


@dataclass(frozen=True, slots=True)
class Turn:
    """The chain once, and each part once at its sizes."""

    chain: Figures
    sizes: Sizes
    costs: Costs

    @property
    def chain_us(self) -> dict[str, float]:
        """The chain's CPU per email, as `Turn.floor_us` is cut."""
        used = self.chain.cpu_us
        return {"ours": sum(used.get(part, 0.0) for part in OURS), **{name: used[name] for name in SERVERS}}

    @property
    def floor_us(self) -> dict[str, float]:
        """The sum of the parts: of the process that does them, and of the servers."""
        parts = self.costs.by_part.values()
        return {
            "ours": sum(part["client"] for part in parts),
            **{name: sum(part[name] for part in parts) for name in SERVERS},
        }


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
    case = Case("sendgrid", options.workers, options.emails, options.prefetch)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-", dir=memory_folder()) as doubles,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
        Progress(*columns, console=console) as bar,
    ):
        facts = {**machine(), **versions(servers)}
        if missing := set(SERVERS) - server_pids(servers).keys():
            raise RuntimeError(f"the CPU of {' and '.join(sorted(missing))} is known of private servers alone")
        task = bar.add_task("chain and parts in turns", total=options.repeat)
        turns = []
        for number in range(options.repeat):
            turns.append(_turn(servers, case, Path(doubles) / str(number)))
            bar.advance(task)
    return turns, facts


def _turn(servers: Servers, case: Case, folder: Path) -> Turn:
    with database(servers) as url:
        chain = measure(servers, case, folder / "chain", url)
    sizes = Sizes(
        prefetch=case.prefetch or load({}).prefetch,
        lease_batch=max(1, round(chain.lease_batch or 1)),
        record_batch=max(1, round(chain.record_batch or 1)),
        in_flight=IN_FLIGHT,
    )
    with (
        database(servers) as url,
        passing_topology(servers) as topology,
        running_double("sendgrid", folder / "parts") as double,
        contextlib.closing(uvloop.new_event_loop()) as loop,
    ):
        with connected(url) as connection:
            enqueue_many(connection, drafts(case.emails))
        assert double.pid is not None
        places = Places(
            database_url=url,
            amqp_url=servers.amqp_url,
            exchange=topology.exchange,
            queue=topology.queue,
            sendgrid_url=double.environment["DISPATCHER_SENDGRID_HOST"],
            ca_file=double.ca_file,
            roots={**server_pids(servers), "double": double.pid},
        )
        asyncio.set_event_loop(loop)
        costs = loop.run_until_complete(measure_parts(places, sizes, case.emails))
    return Turn(chain, sizes, costs)


def overhead(chain_us: Mapping[str, float], floor_us: Mapping[str, float]) -> float:
    """How far the chain is above its floor, as a share of the floor."""
    return sum(chain_us.values()) / sum(floor_us.values()) - 1


def _print(turns: Sequence[Turn], facts: dict[str, Any], console: Console) -> None:
    sizes = turns[-1].sizes
    table = Table(title="CPU microseconds per email, user and system: medians of the turns")
    for heading in ("", "our process", *SERVERS, "sum", "double"):
        table.add_column(heading, justify="left" if not heading else "right")
    for part in PARTS:
        costs = [turn.costs.by_part[part] for turn in turns]
        row = {name: statistics.median(cost[name] for cost in costs) for name in ("client", *SERVERS, "double")}
        _add(table, part, row.pop("client"), row)
    table.add_section()
    floor = _median([turn.floor_us for turn in turns])
    chain = _median([turn.chain_us for turn in turns])
    doubles = statistics.median(sum(part["double"] for part in turn.costs.by_part.values()) for turn in turns)
    _add(table, "floor: their sum", floor["ours"], {**floor, "double": doubles})
    used = statistics.median(turn.chain.cpu_us["double"] for turn in turns)
    _add(table, "chain", chain["ours"], {**chain, "double": used})
    over = {name: f"{chain[name] / floor[name] - 1:+.0%}" if floor[name] else "–" for name in floor}
    spread = Spread.of(overhead(turn.chain_us, turn.floor_us) for turn in turns)
    table.add_row("overhead", over["ours"], *(over[name] for name in SERVERS), f"{spread.median:+.0%}", "")
    console.print(table)
    verdict = "within" if spread.median <= TARGET else "above"
    console.print(
        f"The chain costs {spread.median:+.0%} over its floor ({spread.lowest:+.0%} – {spread.highest:+.0%}), "
        f"{verdict} the {TARGET:.0%} that we allow ourselves; {turns[0].chain.case.workers} workers, "
        f"{statistics.median(turn.chain.emails_per_second for turn in turns):,.0f} emails/s."
    )
    console.print(
        f"Batches as in the chain: {sizes.lease_batch} leased, {sizes.record_batch} recorded and acked at once, "
        f"prefetch {sizes.prefetch}; {sizes.in_flight} requests at once."
    )
    console.print(in_words(facts))


def _add(table: Table, name: str, ours: float, servers: Mapping[str, float]) -> None:
    total = ours + sum(servers[server] for server in SERVERS)
    figures = [ours, *(servers[server] for server in SERVERS), total, servers["double"]]
    table.add_row(name, *(f"{figure:,.0f}" for figure in figures))


def _median(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


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
    parser.add_argument("--emails", type=int, default=10_000, metavar="N", help="per turn; default: 10000")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="of the chain; default: 2")
    parser.add_argument("--prefetch", type=int, metavar="N", help="default: the product's")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="turns; default: 3")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write floor.jsonl and floor.txt there")
    parser.add_argument("--json", action="store_true", help="a line of JSON per turn, and no table")
    options = parser.parse_args()
    if min(options.emails, options.workers, options.repeat) < 1:
        parser.error("--emails, --workers and --repeat are whole numbers from 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
