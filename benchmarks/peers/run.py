"""Compares our dispatcher with other systems in one run: `python benchmarks/peers/run.py --repeat 3 --out DIR`.

Celery, dramatiq, procrastinate and django-post_office do the same job, stock and tuned, as their users would write it.
So does graphile-worker, tuned; it is left out if Node.js cannot be installed. They use the same private servers with
the same durability, and send over TLS to the same provider's double. django-post_office takes no lease, so it is also
measured with an added lease. The cases alternate over the repetitions, so that a slow minute of the machine affects all
cases. Each case has enough emails for about six seconds; they are enqueued before the workers start. Stock peers are
compared with our dispatcher at its defaults (`ours`), all other peers with our tuned dispatcher (`ours-tuned`). `ours`
and `ours-tuned` publish in the measured time. `ours-published`, `ours-tuned-published` and the peers with a broker have
their messages on RabbitMQ before the measured time. Each peer is installed once, into its own environment in the cache
folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # for `python benchmarks/peers/run.py`

from benchmarks.machine import described, machine, versions
from benchmarks.peers import environments, report
from benchmarks.peers.case import measure
from benchmarks.peers.measuring import Load, Measured
from benchmarks.peers.ours import NAMES, OURS, Ours, measure_ours
from benchmarks.peers.roster import PEERS, Knobs, Peer
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.telemetry import log

CASE_SECONDS: Final = 60.0
CASE_SECONDS_UNDER_KILLS: Final = 40.0
"""The time limit with --kill, because a peer may never finish some emails."""
_KNOWN: Final = (*NAMES, *(peer.name for peer in PEERS))
_PEERS_HELP: Final = (
    f"of {', '.join(_KNOWN)}; default: all. If no case of ours is chosen, all of ours are measured, too, "
    "except in a sweep"
)


def main() -> None:
    """The command line."""
    try:
        _main(options_of(sys.argv[1:]))
    except RuntimeError as error:
        sys.exit(str(error))


def _main(options: argparse.Namespace) -> None:
    console = Console(stderr=True)
    log.configure("warning", "auto", sys.stderr)  # for the relay that publishes in this process
    if options.lock:
        environments.lock(options.upgrade)
        return
    pythons = interpreters(options.peers, console)
    options.peers = [peer for peer in options.peers if peer.environment in pythons]
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
    ):
        cases = _sweep(options, pythons, servers) if options.sweep else _all(options, pythons, servers)
        facts = {**machine(), **versions(servers)}
        results = _run(cases, options, facts, Path(folder), console)
    _show(results, facts, options)
    if not options.kill and any(result.missing or result.duplicates for result in results):
        sys.exit("Emails were lost or duplicated: see the columns missing and duplicates.")


def interpreters(peers: Sequence[Peer], console: Console) -> dict[str, Path]:
    """The interpreter of each environment. Leaves out the peers on Node.js if Node.js cannot be installed."""
    pythons = {}
    for name in dict.fromkeys(peer.environment for peer in peers):
        try:
            pythons[name] = environments.interpreter(name, console.log)
        except environments.NodeUnavailable as error:
            console.log(f"{name} is left out, because Node.js is not available: {' '.join(str(error).split())[:200]}")
    return pythons


Case = tuple[str, Callable[[Path], Measured]]
"""The name of a case, and the function that measures the case in its own folder."""


def _all(options: argparse.Namespace, pythons: Mapping[str, Path], servers: Servers) -> list[Case]:
    own = [_own_case(case, servers, case.knobs, options) for case in options.ours]
    return [*own, *(_case(peer, pythons, servers, peer.knobs, options) for peer in options.peers)]


def _sweep(options: argparse.Namespace, pythons: Mapping[str, Path], servers: Servers) -> list[Case]:
    own = [_own_case(case, servers, knobs, options) for case in options.ours for knobs in case.sweep]
    peers = [_case(peer, pythons, servers, knobs, options) for peer in options.peers for knobs in peer.sweep]
    if not own and not peers:
        raise RuntimeError("None of these cases has settings for a sweep.")
    return [*own, *peers]


def _own_case(case: Ours, servers: Servers, knobs: Knobs, options: argparse.Namespace) -> Case:
    return case.name, partial(measure_ours, case, servers, load=_load(options.emails, options), knobs=knobs)


def _case(peer: Peer, pythons: Mapping[str, Path], servers: Servers, knobs: Knobs, options: argparse.Namespace) -> Case:
    python, load = pythons[peer.environment], _load(int(peer.emails * options.peer_share), options)
    return peer.name, lambda folder: measure(peer, python, servers, folder, load, knobs)


def _load(emails: int, options: argparse.Namespace) -> Load:
    return Load(emails, CASE_SECONDS_UNDER_KILLS if options.kill else CASE_SECONDS, options.kill)


def _run(
    cases: list[Case], options: argparse.Namespace, facts: Mapping[str, object], folder: Path, console: Console
) -> list[Measured]:
    results: list[Measured] = []
    if options.out:
        report.begin(options.out)
    with _progress(console, len(cases) * options.repeat) as advance:
        for repetition in range(options.repeat):
            for number, (name, run) in enumerate(cases):
                advance(name)
                results.append(run(folder / f"case-{repetition}-{number}"))
                if options.out:
                    report.append(options.out, results[-1], facts)
                console.log(
                    f"{name}: {results[-1].emails_per_second:,.0f} emails/s {report.described(results[-1].knobs)}"
                )
    return results


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar; yields the function to call before each case."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring", total=total)
        began = False

        def advance(name: str) -> None:
            nonlocal began
            bar.update(task, description=name, advance=int(began))
            began = True

        yield advance


def _show(results: list[Measured], facts: dict[str, object], options: argparse.Namespace) -> None:
    cases = report.by_case(results)
    if options.out:
        from benchmarks.peers.plot import plot

        plot(options.out, cases, described(facts))
        report.write_tables(options.out, cases, described(facts))
    if options.json:
        sys.stdout.write("".join(report.line(result, facts) for result in results))
        return
    console = Console(width=None if sys.stdout.isatty() else report.WIDTH)
    for table in report.tables(cases):
        console.print(table)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. In the result, `ours` and `peers` contain the chosen cases."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/peers/run.py", description=summary, epilog=details)
    parser.add_argument(
        "--emails", type=int, default=45_000, metavar="N", help="emails per case of ours; default: 45000"
    )
    parser.add_argument(
        "--peer-share", type=float, default=1.0, metavar="F", help="factor for the peers' numbers of emails; default: 1"
    )
    parser.add_argument("--peers", type=_names, default=list(_KNOWN), metavar="NAME,…", help=_PEERS_HELP)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write peers.jsonl, tables.txt and plots there")
    parser.add_argument(
        "--json", action="store_true", help="print one line per case and repetition instead of the table"
    )
    parser.add_argument("--without-ours", action="store_true", help="measure only the peers")
    parser.add_argument(
        "--kill",
        action="store_true",
        help="SIGKILL the busiest worker of each case when a third of the emails is accepted",
    )
    parser.add_argument("--sweep", action="store_true", help="try several settings to find the best ones")
    parser.add_argument("--lock", action="store_true", help="write the peers' requirements.txt and exit")
    parser.add_argument("--upgrade", action="store_true", help="with --lock: upgrade to the newest versions")
    options = parser.parse_args(arguments)
    options.ours, options.peers = _chosen(options)
    return options


def _chosen(options: argparse.Namespace) -> tuple[list[Ours], list[Peer]]:
    """The chosen cases of our dispatcher and of the peers. If only peers are chosen, adds all cases of our
    dispatcher."""
    own = [case for case in OURS if case.name in options.peers]
    if not own and not options.sweep:
        own = list(OURS)
    return [] if options.without_ours else own, [peer for peer in PEERS if peer.name in options.peers]


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in _KNOWN]:
        raise argparse.ArgumentTypeError(f"knows no {', '.join(unknown)}; there are {', '.join(_KNOWN)}")
    return names


if __name__ == "__main__":
    main()
