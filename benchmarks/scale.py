"""Measures several hosts, and the death of one host: `python benchmarks/scale.py --hosts 1,2,4 --emails 20000`.

A host is a `dispatcher run` with its own name and run directory. All hosts share one PostgreSQL, one RabbitMQ and,
here, the cores of one machine. So the result is the cost of sharing, not the speed of several machines. Each number of
hosts is compared with one host that has the same total number of workers. The output is emails per second, each host's
share, and the lost, duplicate and held emails.

With `--kill`, all processes of one of two hosts get SIGKILL at the same time in the middle of the run. In one case the
host does not restart; in a second case it restarts in the same run directory. The output is the number of emails that
the host had leased, the final status of these emails, and the time until all emails were finished.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/scale.py`

from benchmarks.doubles import PROVIDERS
from benchmarks.machine import machine
from benchmarks.rig import Case, Stage, stage, wait_until
from benchmarks.vitals import Member, members
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected
from dispatcher.store.figures import count_emails

DONE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Shared:
    """The joint result of several hosts.

    Attributes:
        emails_per_second: The rate while all hosts worked.
        shares: Each host's share of the emails while all hosts worked, in percent.
        lost: Emails that are not in our tables, and emails that our tables have as sent but the provider's ledger does
            not have.
    """

    hosts: int
    workers_per_host: int
    emails_per_second: float
    shares: dict[str, float]
    lost: int
    duplicates: int
    held: int


@dataclass(frozen=True, slots=True)
class Death:
    """The result for a killed host's emails.

    Attributes:
        returns: Whether the host was restarted in its run directory.
        leased: Emails that the host had leased when it died.
        on_wire: Leased emails that the provider had accepted but our tables had not recorded.
        settled_seconds: From the kill until no email was pending or sending.
    """

    returns: bool
    lease_seconds: int
    leased: int
    on_wire: int
    settled_seconds: float
    sent: int
    held: int
    held_but_accepted: int
    lost: int
    duplicates: int


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as name,
        private_servers(Path(name) / "servers", progress=console.log) as servers,
    ):
        if options.kill:
            found: Sequence[Shared | Death] = [
                _die(servers, options, Path(name) / f"case-{returns}", returns=returns, console=console)
                for returns in (False, True)
            ]
        else:
            found = _scale(servers, options, Path(name), console)
    lines = [json.dumps({**asdict(each), **machine()}) for each in found]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "scale.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if options.json:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(found))
    if any(each.lost or each.duplicates for each in found):
        sys.exit("Emails were lost or duplicated: see the columns lost and duplicates.")


def _scale(servers: Servers, options: argparse.Namespace, folder: Path, console: Console) -> list[Shared]:
    shapes = [shape for hosts in options.hosts for shape in {(1, hosts * options.workers), (hosts, options.workers)}]
    found = []
    for repetition in range(options.repeat):
        for hosts, workers in shapes:
            place = folder / f"case-{repetition}-{hosts}-{workers}"
            found.append(_share(servers, options, place, hosts, workers))
            shares = ", ".join(f"{share:.0f} %" for share in found[-1].shares.values())
            console.log(f"{hosts} hosts of {workers} workers: {found[-1].emails_per_second:,.0f}/s, shares {shares}")
    return found


def _share(servers: Servers, options: argparse.Namespace, folder: Path, hosts: int, workers: int) -> Shared:
    case = Case(options.provider, workers, options.emails, latency_ms=options.latency_ms)
    with stage(servers, case, folder) as scene:
        with ExitStack() as stack:
            for number in range(hosts):
                stack.enter_context(scene.running(_name(number), {"DISPATCHER_HOST_NAME": _name(number)}))
            wait_until(lambda: not _unfinished(scene), DONE_SECONDS)
        books, (rate, shares) = _books(scene), _together(scene)
        return Shared(hosts, workers, rate, shares, books["lost"], books["duplicates"], books["held"])


def _die(servers: Servers, options: argparse.Namespace, folder: Path, *, returns: bool, console: Console) -> Death:
    case = Case(options.provider, options.workers, options.emails, latency_ms=options.latency_ms)
    lease = {"DISPATCHER_LEASE_SECONDS": str(options.lease_seconds)}
    with stage(servers, case, folder) as scene, ExitStack() as stack:
        stack.enter_context(scene.running(_name(0), {**lease, "DISPATCHER_HOST_NAME": _name(0)}))
        with _doomed(scene, {**lease, "DISPATCHER_HOST_NAME": _name(1)}) as doomed:
            wait_until(lambda: _half_sent(scene), DONE_SECONDS)
            _kill(members(os.getpid()), doomed.pid)
        killed_at = time.monotonic()
        leased = _leased_by(scene, _name(1))
        known = {email_id for email_id, instants in scene.double.acceptances().items() if instants}
        console.log(f"{_name(1)} is dead; it had leased {len(leased)} emails")
        if returns:
            stack.enter_context(scene.running(_name(1), {**lease, "DISPATCHER_HOST_NAME": _name(1)}))
        wait_until(lambda: not _unfinished(scene), DONE_SECONDS)
        seconds = time.monotonic() - killed_at
        stack.close()
        books = _books(scene)
        return Death(returns, options.lease_seconds, len(leased), len(leased & known), seconds, **books)


@contextmanager
def _doomed(scene: Stage, settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a host that will be killed. The host may exit with an error."""
    environment = {**scene.environment, "DISPATCHER_RUN_DIR": str(scene.folder / _name(1)), **settings}
    with (scene.folder / f"{_name(1)}-first.log").open("wb") as log:
        command = [sys.executable, "-m", "dispatcher.cli.main", "run"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _kill(everybody: Sequence[Member], parent: int) -> None:
    """Kill all processes of a host before any process can react."""
    os.kill(parent, signal.SIGSTOP)
    for member in everybody:
        if member.parent == parent:
            os.kill(member.pid, signal.SIGKILL)
    os.kill(parent, signal.SIGKILL)


def _name(number: int) -> str:
    return f"host-{number}"


def _unfinished(scene: Stage) -> bool:
    with connected(scene.database_url) as connection:
        counts = count_emails.sync(connection)
    return any(counts[status] for status in counts if status in ("pending", "sending"))


def _half_sent(scene: Stage) -> bool:
    with connected(scene.database_url) as connection:
        return count_emails.sync(connection)["sent"] >= scene.case.emails // 2  # type: ignore[index]


def _leased_by(scene: Stage, host: str) -> set[str]:
    with connected(scene.database_url) as connection:
        rows = connection.execute(
            "select email_id from dispatcher.email_log where status = 'sending' and split_part(locked_by, ':', 1) = %s",
            [host],
        ).fetchall()
    return {str(email_id) for (email_id,) in rows}


# This query counts from the first attempt of the host that started last. Before that time, not all hosts worked.
_TOGETHER = """
with attempts as (
    select split_part(worker, ':', 1) as host, started_at, finished_at from dispatcher.every_attempt
),
together as (
    select max(first_at) as since from (select min(started_at) as first_at from attempts group by host) as beginnings
)
select host, count(*), extract(epoch from max(finished_at) - min(since))::float8
from attempts, together
where started_at >= since
group by host
order by host
"""


def _together(scene: Stage) -> tuple[float, dict[str, float]]:
    """Emails per second while all hosts worked, and each host's share in percent."""
    with connected(scene.database_url) as connection:
        rows = connection.execute(_TOGETHER).fetchall()
    emails = sum(count for _, count, _ in rows)
    return emails / max(seconds for *_, seconds in rows), {host: 100 * count / emails for host, count, _ in rows}


def _books(scene: Stage) -> dict[str, int]:
    with connected(scene.database_url) as connection:
        rows = connection.execute("select email_id, status from dispatcher.email_log").fetchall()
    statuses = {str(email_id): status for email_id, status in rows}
    acceptances = scene.double.acceptances()
    sent = {email_id for email_id, status in statuses.items() if status == "sent"}
    held = {email_id for email_id, status in statuses.items() if status == "held"}
    return {
        "sent": len(sent),
        "held": len(held),
        "held_but_accepted": len(held & acceptances.keys()),
        "lost": len(sent - acceptances.keys()) + len(scene.ids - statuses.keys()),
        "duplicates": sum(len(instants) - 1 for instants in acceptances.values()),
    }


def _table(found: Sequence[Shared | Death]) -> Table:
    deaths = [each for each in found if isinstance(each, Death)]
    return _table_of_deaths(deaths) if deaths else _table_of_shares([e for e in found if isinstance(e, Shared)])


def _table_of_shares(found: Sequence[Shared]) -> Table:
    shown = Table(title="Several hosts on one machine, median of the repetitions (lowest – highest)")
    for heading in ("hosts", "workers each", "emails/s", "range", "share of a host", "lost", "duplicates", "held"):
        shown.add_column(heading, justify="right")
    by_shape: dict[tuple[int, int], list[Shared]] = {}
    for each in found:
        by_shape.setdefault((each.hosts, each.workers_per_host), []).append(each)
    for (hosts, workers), measured in by_shape.items():
        rates = [each.emails_per_second for each in measured]
        shares = [share for each in measured for share in each.shares.values()]
        shown.add_row(
            str(hosts),
            str(workers),
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            f"{min(shares):.0f} – {max(shares):.0f} %",
            *(str(sum(getattr(each, book) for each in measured)) for book in ("lost", "duplicates", "held")),
        )
    return shown


def _table_of_deaths(found: Sequence[Death]) -> Table:
    shown = Table(title="All processes of one of two hosts are killed in the middle of the run")
    shown.add_column("")
    for each in found:
        shown.add_column("the host restarts" if each.returns else "the host never returns", justify="right")
    rows: dict[str, list[object]] = {
        "emails that it had leased": [each.leased for each in found],
        "of these, accepted but not recorded": [each.on_wire for each in found],
        "seconds until all were settled": [f"{each.settled_seconds:.1f}" for each in found],
        "lease, seconds": [each.lease_seconds for each in found],
        "held": [each.held for each in found],
        "of these, accepted": [each.held_but_accepted for each in found],
        "sent": [each.sent for each in found],
        "lost": [each.lost for each in found],
        "duplicates": [each.duplicates for each in found],
    }
    for words, figures in rows.items():
        shown.add_row(words, *(str(figure) for figure in figures))
    return shown


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/scale.py", description=summary, epilog=details)
    parser.add_argument("--hosts", type=_numbers, default=[1, 2, 4], metavar="N,…", help="default: 1,2,4")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers of each host; default: 1")
    parser.add_argument("--emails", type=int, default=20_000, metavar="N", help="per case; default: 20000")
    parser.add_argument("--provider", choices=PROVIDERS, default="sendgrid", help="default: sendgrid")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="latency of the provider's double; default: 0")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--kill", action="store_true", help="instead, kill one of two hosts in the middle of the run")
    parser.add_argument("--lease-seconds", type=int, default=10, metavar="S", help="with --kill; default: 10")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write scale.jsonl there")
    parser.add_argument("--json", action="store_true", help="print one line per case and repetition")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("must be whole numbers from 1")
    return numbers


if __name__ == "__main__":
    main()
