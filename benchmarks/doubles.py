"""The provider's side of a benchmark: runs a provider's double in a separate process, and reads the acceptances."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.c_sink import running_c_sink
from benchmarks.double import read_acceptances
from dispatcher.dev.acceptance_ledger import read_ledger

PROVIDERS: Final = ("sendgrid", "ses", "resend", "smtp", "capture")

Acceptances = Mapping[str, Sequence[float]]
"""The times of acceptance by email id, in Unix seconds; an email with two times was accepted twice."""


@dataclass(frozen=True, slots=True)
class Double:
    """A running double of a provider.

    Attributes:
        pid: The double's process id; None if the provider is a folder.
        environment: The settings with which the product sends to the double.
        acceptances: Reads the double's ledger.
        ca_file: The authority to trust; None without TLS.
        keeps_books: Whether the double keeps a ledger; without a ledger, `acceptances` returns nothing.
    """

    pid: int | None
    environment: Mapping[str, str]
    acceptances: Callable[[], Acceptances]
    ca_file: Path | None = None
    keeps_books: bool = True


@contextmanager
def running_double(provider: str, folder: Path, latency_ms: float = 0.0, *, sink: str = "python") -> Iterator[Double]:
    """Run a provider's double for the duration of the block. The ledger stays in the folder.

    Args:
        sink: For smtp: `python` is our sink, which keeps a ledger; `c` is Postfix's sink, which keeps no ledger and
            uses less CPU.
    """
    if provider == "capture":
        maildir = folder / "maildir"
        yield Double(None, {"DISPATCHER_CAPTURE_DIR": str(maildir)}, lambda: _captured(maildir / "new"))
    elif provider == "smtp" and sink == "c":
        with running_c_sink(latency_ms) as (pid, port):
            yield Double(pid, {"DISPATCHER_SMTP_URL": f"smtp://127.0.0.1:{port}?tls=none"}, dict, keeps_books=False)
    elif provider == "smtp":
        arguments = ["--folder", str(folder / "sink"), "--no-eml", "--latency-ms", str(latency_ms)]
        with _process("dispatcher.dev.smtp_sink", arguments) as (pid, ready):
            url = f"smtp://127.0.0.1:{ready['port']}?tls=none"
            yield Double(pid, {"DISPATCHER_SMTP_URL": url}, lambda: _in_sink(folder / "sink" / "ledger.jsonl"))
    elif provider == "twilio":
        arguments = ["--folder", str(folder / "twilio"), "--latency-ms", str(latency_ms)]
        with _process("dispatcher.dev.http_double", arguments) as (pid, ready):
            ledger = Path(ready["ledger"])
            yield Double(pid, _settings_of(provider, ready["url"]), lambda: _in_sink(ledger))
    else:
        arguments = ["--folder", str(folder / "double"), "--tls", "--latency-ms", str(latency_ms)]
        with _process("benchmarks.double", arguments) as (pid, ready):
            ca_file, ledger = Path(ready["ca_file"]), Path(ready["ledger"])
            environment = {**_settings_of(provider, ready["url"]), "DISPATCHER_CA_FILE": str(ca_file)}
            yield Double(pid, environment, lambda: read_acceptances(ledger), ca_file)


def _settings_of(provider: str, url: str) -> dict[str, str]:
    if provider == "sendgrid":
        return {"SENDGRID_API_KEY": "SG.benchmark", "DISPATCHER_SENDGRID_HOST": url}
    if provider == "twilio":
        return {
            "DISPATCHER_SMS_PROVIDERS": "twilio",
            "DISPATCHER_TWILIO_URL": url,
            "DISPATCHER_TWILIO_ACCOUNT_SID": f"AC{'0' * 32}",
            "DISPATCHER_TWILIO_AUTH_TOKEN": "benchmark",
            "DISPATCHER_TWILIO_SENDER": "Example",
            "DISPATCHER_SMS_COUNTRIES": "DE",
            "DISPATCHER_TWILIO_CALLBACK_URL": "https://mail.example.org/v1/events/twilio",
        }
    if provider == "resend":
        return {"RESEND_API_KEY": "re_benchmark", "DISPATCHER_RESEND_URL": url}
    return {
        "DISPATCHER_SES_ENDPOINT_URL": url,
        "AWS_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def _process(module: str, arguments: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    command = [sys.executable, "-m", module, *arguments, "--die-with-parent"]
    checkout = Path(__file__).resolve().parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=checkout, process_group=0) as process:
        assert process.stdout is not None
        try:
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.terminate()


def _captured(folder: Path) -> dict[str, list[float]]:
    acceptances: dict[str, list[float]] = {}
    for path in folder.iterdir():
        acceptances.setdefault(path.name.split(".")[0], []).append(path.stat().st_mtime)
    return acceptances


def _in_sink(path: Path) -> dict[str, list[float]]:
    acceptances: dict[str, list[float]] = {}
    for entry in read_ledger(path).entries:
        acceptances.setdefault(entry.email_id, []).append(entry.accepted_at)
    return acceptances
