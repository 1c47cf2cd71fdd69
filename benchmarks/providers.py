"""Compares an adapter with the vendor's client: throughput, and CPU per email.

One process sends with a fixed number of emails in flight, without a database or a broker. The adapter sends over TLS to
the HTTP double, which runs in its own process on the same machine. The vendor's client gets as many threads as the
adapter has emails in flight, and trusts the system's authorities in addition to the double's, as in production. The CPU
is the CPU time of the measuring process with all its threads. The double's CPU is shown separately, because the double
uses the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import sendgrid  # noqa: F401 - otherwise the adapter would import it during the measurement
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/providers.py`

from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Accepted
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from dispatcher.providers.sendgrid import SendGridProvider, SendGridSettings

ADAPTER: Final = "sendgrid adapter"
STOCK: Final = "python-sendgrid, unchanged"
DEADLINE_SECONDS: Final = 60.0
_SYSTEM: Final = ssl.get_default_verify_paths().cafile
BODY: Final = "<p>Thank you for your order. It leaves our house tomorrow, and you will hear from us then.</p>\n" * 10


@dataclass(frozen=True, slots=True)
class Double:
    """The double's process and its paths."""

    pid: int
    url: str
    ca_file: Path
    ledger: Path


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement of one client.

    Attributes:
        cpu_microseconds: The CPU of this process, per email.
        double_microseconds: The CPU of the double, per email.
        repeated: Acceptances of emails that were already accepted, from the ledger.
        missing: Emails that are not in the ledger.
    """

    client: str
    emails: int
    in_flight: int
    emails_per_second: float
    cpu_microseconds: float
    double_microseconds: float
    repeated: int
    missing: int


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    sizes = {ADAPTER: options.emails, STOCK: options.stock_emails}
    results: list[Measured] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring", total=len(CLIENTS) * options.repeat)
        for _ in range(options.repeat):
            # The two clients alternate, so that a slow minute of the machine affects both clients.
            for client in CLIENTS:
                bar.update(task, description=client)
                with _running_double(options.latency_ms) as double:
                    results.append(_measure(client, double, sizes[client], options.in_flight))
                bar.advance(task)
    _show(results, as_json=options.json)
    if any(result.repeated or result.missing for result in results):
        sys.exit("Emails were duplicated or lost: see the columns repeated and missing.")


def _measure(client: str, double: Double, count: int, in_flight: int) -> Measured:
    emails = [_email(number) for number in range(count)]
    double_started, cpu_started, started = _cpu_seconds(double.pid), time.process_time(), time.perf_counter()
    CLIENTS[client](double, emails, in_flight)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    double_cpu = _cpu_seconds(double.pid) - double_started
    times = Counter(read_ledger(double.ledger).times)
    return Measured(
        client,
        count,
        in_flight,
        count / seconds,
        cpu / count * 1e6,
        double_cpu / count * 1e6,
        repeated=times.total() - len(times),
        missing=sum(str(email.email_id) not in times for email in emails),
    )


def _with_adapter(double: Double, emails: list[OutgoingEmail], in_flight: int) -> None:
    uvloop.run(_send_all(double, emails, in_flight))


async def _send_all(double: Double, emails: list[OutgoingEmail], in_flight: int) -> None:
    provider = SendGridProvider(
        SendGridSettings(api_key="SG.benchmark", host=double.url), connections=in_flight, ca_file=double.ca_file
    )
    waiting = iter(emails)
    await asyncio.gather(*(_lane(provider, waiting) for _ in range(in_flight)))
    await provider.close()


async def _lane(provider: SendGridProvider, waiting: Iterator[OutgoingEmail]) -> None:
    loop = asyncio.get_running_loop()
    for email in waiting:
        outcome = await provider.send(email, Attempt(1, loop.time() + DEADLINE_SECONDS))
        assert isinstance(outcome, Accepted), outcome


def _with_stock(double: Double, emails: list[OutgoingEmail], in_flight: int) -> None:
    bundle = double.ledger.with_name("bundle.pem")
    bundle.write_bytes(double.ca_file.read_bytes() + (Path(_SYSTEM).read_bytes() if _SYSTEM else b""))
    # python-sendgrid uses urllib, which reads this variable for each connection.
    os.environ["SSL_CERT_FILE"] = str(bundle)
    with ThreadPoolExecutor(in_flight) as threads:
        for status in threads.map(lambda email: _send_with_stock(double.url, email), emails):
            assert status == 202, status


def _send_with_stock(url: str, email: OutgoingEmail) -> int:
    from sendgrid import SendGridAPIClient
    from sendgrid.helpers.mail import CustomArg, Mail

    mail = Mail(email.sender, email.to[0], email.subject, email.text, email.html)
    mail.add_custom_arg(CustomArg("email_id", str(email.email_id)))
    status: int = SendGridAPIClient("SG.benchmark", url).send(mail).status_code
    return status


CLIENTS: Final[dict[str, Callable[[Double, list[OutgoingEmail], int], None]]] = {
    ADAPTER: _with_adapter,
    STOCK: _with_stock,
}


def _email(number: int) -> OutgoingEmail:
    return OutgoingEmail(
        email_id=new_email_id(),
        created_at=datetime.now(UTC),
        sender="Shop <shop@example.com>",
        to=(f"Customer <customer{number}@example.org>",),
        subject=f"Your order {number}",
        text="Thank you for your order.\n",
        html=BODY,
    )


@contextmanager
def _running_double(latency_ms: float) -> Iterator[Double]:
    # The ledger is in memory, so that the disk does not distort the result.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="dispatcher-bench-") as folder:
        command = [sys.executable, "-m", "dispatcher.dev.http_double", "--folder", folder, "--tls", "--die-with-parent"]
        with subprocess.Popen([*command, "--latency-ms", str(latency_ms)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            try:
                yield Double(process.pid, ready["url"], Path(ready["ca_file"]), Path(ready["ledger"]))
            finally:
                process.terminate()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _show(results: list[Measured], *, as_json: bool) -> None:
    ratio = _median(results, ADAPTER, "emails_per_second") / _median(results, STOCK, "emails_per_second")
    if as_json:
        for result in results:
            sys.stdout.write(json.dumps({**dataclasses.asdict(result), "ratio": round(ratio, 1), **_machine()}) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(results))
    console.print(f"{ratio:,.0f} times the throughput of the vendor's client. {_machine()}")


def _table(results: list[Measured]) -> Table:
    table = Table(title="SendGrid's API over TLS, one process; medians (lowest – highest)")
    headings = ("client", "concurrent", "emails", "emails/s", "range", "CPU µs", "double µs", "repeated", "missing")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for client in CLIENTS:
        measured = [result for result in results if result.client == client]
        rates = [result.emails_per_second for result in measured]
        table.add_row(
            client,
            str(measured[0].in_flight),
            f"{measured[0].emails:,}",
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            f"{_median(results, client, 'cpu_microseconds'):,.0f}",
            f"{_median(results, client, 'double_microseconds'):,.0f}",
            str(sum(result.repeated for result in measured)),
            str(sum(result.missing for result in measured)),
        )
    return table


def _machine() -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "python": platform.python_version()}


def _median(results: Iterable[Measured], client: str, figure: str) -> float:
    figures: list[float] = [getattr(result, figure) for result in results if result.client == client]
    return statistics.median(figures)


def _options() -> Any:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/providers.py", description=summary, epilog=details)
    parser.add_argument(
        "--emails", type=int, default=10_000, metavar="N", help="emails for the adapter; default: 10000"
    )
    parser.add_argument(
        "--stock-emails", type=int, default=500, metavar="N", help="emails for the vendor's client; default: 500"
    )
    parser.add_argument("--in-flight", type=int, default=64, metavar="N", help="concurrent emails; default: 64")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="latency of the double; default: 0")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per client and repetition")
    return parser.parse_args()


if __name__ == "__main__":
    main()
