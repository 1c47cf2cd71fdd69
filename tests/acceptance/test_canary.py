"""Nothing private comes out: emails, keys and passwords full of canaries through the whole chain at its most talkative.

What is left out, and why: the provider's end and the tables of content, where canaries belong; the bytes of a poison
message, which are RabbitMQ's copy of what a stranger sent, and which `dlq show p-…` is there to print (`dlq list` does
without addresses in them); and what `dlq show --reveal` prints, for which somebody had to give a reason.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.acceptance import canary
from tests.acceptance.canary_api import BAD_BODIES, ask_everything, request
from tests.acceptance.double import Double, InOrder
from tests.acceptance.harness import Host, Sink
from tests.alerts.receiver import SECRET, Receiver, receiving, write_ca
from tests.cli.commandline import in_process
from tests.supervisor.program import Program, eventually
from tests.telemetry.otlp import Collector, collecting

PASSWORD_URL = "smtp://postmaster:{}@127.0.0.1:{}?tls=none"


@dataclass
class Place:
    """A host with two providers' ends, all that watches it, and an operators' mailbox; and what was heard."""

    host: Host
    double: Double
    sink: Sink
    receiver: Receiver
    collector: Collector
    operators: Sink
    settings: dict[str, Any]
    heard: dict[str, bytes | str] = field(default_factory=dict)

    def command(self, *words: str) -> str:
        """Runs a command to its end, and keeps what it said."""
        ended = in_process(*words)
        self.heard[" ".join(words)] = ended.stdout + ended.stderr
        assert ended.code in (0, 3) or words == ("doctor",), ended
        return ended.stdout

    def get(self, listener: str, path: str) -> None:
        """Looks at a page, and keeps it."""
        self.heard[path] = request(listener, "GET", path)[1]


@pytest.fixture
def place(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The place, its servers running."""
    ca = trustme.CA()
    login = ("--login", f"postmaster:{canary.PASSWORD}")
    double = Double(tmp_path / "sendgrid")
    sink, operators = Sink(tmp_path / "sink", *login), Sink(tmp_path / "operators", *login, keeps_eml=True)
    host.recipient = InOrder(double, sink)
    with receiving(ca, "127.0.0.1") as receiver, collecting() as collector:
        settings = {
            "LOG_LEVEL": "debug",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "SENDGRID_API_KEY": canary.API_KEY,
            "SMTP_URL": _with_password(sink),
            "MAX_ATTEMPTS": 2,
            "METRICS_ADDRESS": "127.0.0.1:0",
            "DLQ_PROBE_SECONDS": 0.5,
            "ALERT_WEBHOOK_URL": receiver.url,
            "ALERT_WEBHOOK_SECRET": SECRET,
            "ALERT_WEBHOOK_ALLOW_PRIVATE": "on",
            "ALERT_SMTP_URL": _with_password(operators),
            "ALERT_EMAIL_FROM": "dispatcher@example.com",
            "ALERT_EMAIL_TO": "night@example.com",
            "CA_FILE": write_ca(ca, tmp_path),
        }
        for name, value in host.environment(**settings).items():
            monkeypatch.setenv(name, value)
        yield Place(host, double, sink, receiver, collector, operators, settings)
    for each in (double, sink, operators):
        each.kill()


def _with_password(sink: Sink) -> str:
    port = sink.settings["SMTP_URL"].rpartition(":")[2].partition("?")[0]
    return PASSWORD_URL.format(canary.PASSWORD, port)


def test_nothing_private_comes_out_anywhere(place: Place) -> None:
    host = place.host
    run = host.run(**place.settings)
    listener = run.await_events("http.listening")["listener"]

    _send_in_every_way(place, run)
    api = _ask_the_api(place)
    host.rabbit.publish(host.topology.queue, *BAD_BODIES[:2], b"\x1b]0;" + canary.RECIPIENT.encode())
    run.await_events("message.rejected", 3)
    _look_at_everything(place, listener)
    titles = [_title(pid) for pid in (*run.members(), *api.members())]
    eventually(lambda: place.receiver.posted, "a webhook")
    eventually(lambda: list(place.operators.mail_folder.glob("*.eml")), "an email to operators")
    for program in (api, run):
        program.send(signal.SIGTERM)
        assert program.await_exit() == 0

    letters = [letter for letter in host.rabbit.read_all(host.topology.dlq) if not letter.was_rejected]
    assert letters
    assert place.collector.bodies
    places: dict[str, bytes | str] = {
        **place.heard,
        "process titles": b"\n".join(titles),
        "webhooks": b"\n".join(str(posted.headers).encode() + posted.body for posted in place.receiver.posted),
        "spans": b"\n".join(place.collector.bodies),
        "dead letters": "\n".join(f"{letter.properties!r} {letter.body!r}" for letter in letters),
        **{f"{each.pid} log": each.log for each in (run, api)},
        **{f"{each.pid} stderr": each.words for each in (run, api)},
        **canary.files_below(host.run_dir),
        **canary.files_below(place.operators.mail_folder),
        **canary.tables(host.database_url, of_content=False),
    }
    poison = {words: places.pop(words) for words in list(places) if "--poison" in words}
    assert canary.found_in(places) == []
    assert not [found for found in canary.found_in(poison) if found.startswith(("recipient", "sender"))]
    # It would have been noticed.
    content = canary.found_in(canary.tables(host.database_url, of_content=True))
    assert {found.partition(" in ")[0] for found in content} >= {"recipient", "subject", "text", "html", "header"}


def _send_in_every_way(place: Place, run: Program) -> None:
    """An email for each way in which one may end, each with a provider that repeats what it was told."""
    host, double = place.host, place.double
    host.await_finished(host.enqueue([canary.email("accepted")]))
    complaint = {"errors": [{"message": canary.ECHO, "field": "personalizations.0.to.0.email"}]}
    double.behave(reply={"status": 400, "body": complaint})
    host.await_finished(host.enqueue([canary.email("rejected")]))
    # Deferred, and taken by the other provider.
    double.behave(reply={"status": 503, "body": complaint})
    host.await_finished(host.enqueue([canary.email("deferred")]))
    double.behave(act="close")
    host.await_finished(host.enqueue([canary.email("held")]))
    _kill_while_on_the_wire(place, run)
    # The account is refused, and the other provider refuses the emails.
    place.sink.become("--login", f"postmaster:{canary.PASSWORD}", "--reply", f"end=554 5.7.1 {canary.ECHO}")
    double.behave(reply={"status": 401, "body": complaint})
    host.await_finished(host.enqueue([canary.email("refused")]))
    run.await_events("provider.paused", provider="sendgrid", state="open")
    place.sink.become("--reply", f"end=451 4.2.0 {canary.ECHO}", "--login", f"postmaster:{canary.PASSWORD}")
    host.await_finished(host.enqueue([canary.email("exhausted")]))
    place.sink.become("--login", "postmaster:another", "--reply", f"auth=535 5.7.8 {canary.PASSWORD}: {canary.ECHO}")
    host.enqueue([canary.email("waiting")])
    run.await_events("provider.paused", provider="smtp", state="open")
    # From here on they are asked about other emails, or none.
    double.behave(reply={"status": 401})


def _kill_while_on_the_wire(place: Place, run: Program) -> None:
    seen = len(place.double.requests())
    place.double.behave(act="hang")
    ids = place.host.enqueue([canary.email("killed")])
    eventually(lambda: len(place.double.requests()) > seen, "an email on the wire")
    (owner,) = {place.host.rows()[email_id].locked_by for email_id in ids}
    assert owner is not None
    # The ledger as it is while it is needed.
    place.heard.update({f"{path} early": octets for path, octets in _files(place.host.run_dir).items()})
    run.send_to(int(owner.split(":")[2]), signal.SIGKILL)
    place.host.await_finished(ids)


def _title(pid: int) -> bytes:
    with suppress(OSError):  # It may have ended since.
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _files(folder: Path) -> dict[str, bytes]:
    with suppress(FileNotFoundError):
        return canary.files_below(folder)
    return {}


def _ask_the_api(place: Place) -> Program:
    api = place.host.command("api", **{**place.settings, "API_ADDRESS": "127.0.0.1:0", "API_ALLOW_ANONYMOUS": "on"})
    place.heard["the API's answers"] = ask_everything(api.await_events("api.started")["listener"])
    return api


def _look_at_everything(place: Place, listener: str) -> None:
    """As an operator does."""
    for page in ("/metrics", "/readyz", "/healthz"):
        place.get(listener, page)
    failed = next(str(each) for each, row in place.host.rows().items() if row.status == "failed")
    held = next(str(each) for each, row in place.host.rows().items() if row.status == "held")
    for words in (
        ("dlq", "list"), ("dlq", "list", "--json"), ("dlq", "list", "--poison"), ("dlq", "list", "--poison", "--json"),
        ("dlq", "show", failed), ("dlq", "show", failed, "--json"), ("held", "list"), ("held", "list", "--json"),
        ("status",), ("status", "--json"), ("config",), ("config", "--json"), ("doctor",),
    ):  # fmt: skip
        place.command(*words)
    why = ("--reason", f"{canary.RECIPIENT} says so")
    assert canary.CANARIES["text"] in place.command("dlq", "show", failed, "--reveal", *why)
    del place.heard[" ".join(("dlq", "show", failed, "--reveal", *why))]
    place.command("held", "confirm", held, *why)
