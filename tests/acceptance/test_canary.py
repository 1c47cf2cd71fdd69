"""Nothing private leaks: emails, keys and passwords with canaries pass through the whole system with the most verbose
settings.

Three places are excluded: the provider and the content tables, where canaries belong; the bytes of a poison message,
which came from outside and which `dlq show p-…` prints on purpose (`dlq list` prints them without addresses); and the
output of `dlq show --reveal`, for which an operator gives a reason.
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
from tests.acceptance.canary import BAD_BODIES, ask_everything, request
from tests.acceptance.harness import Double, Host, Sink
from tests.cli.commandline import in_process
from tests.monitor.receiver import SECRET, Receiver, write_ca
from tests.supervisor.program import Program, eventually
from tests.telemetry.otlp import Collector, collecting

PASSWORD_URL = "smtp://postmaster:{}@127.0.0.1:{}?tls=none"


@dataclass
class Setup:
    host: Host
    double: Double
    sink: Sink
    receiver: Receiver
    collector: Collector
    operators: Sink
    settings: dict[str, Any]
    output: dict[str, bytes | str] = field(default_factory=dict)

    def command(self, *words: str) -> str:
        ended = in_process(*words)
        self.output[" ".join(words)] = ended.stdout + ended.stderr
        assert ended.code in (0, 3) or words == ("doctor",), ended
        return ended.stdout


@pytest.fixture
def place(
    host: Host, tmp_path: Path, double: Double, receiver: Receiver, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setup]:
    login = ("--login", f"postmaster:{canary.PASSWORD}")
    sink, operators = Sink(tmp_path / "sink", *login), Sink(tmp_path / "operators", *login, keeps_eml=True)
    with collecting() as collector:
        settings = {
            "LOG_LEVEL": "debug",
            "PROVIDERS": "sendgrid,smtp",
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
        yield Setup(host, double, sink, receiver, collector, operators, settings)
    for each in (sink, operators):
        each.kill()


def _with_password(sink: Sink) -> str:
    port = sink.settings["SMTP_URL"].rpartition(":")[2].partition("?")[0]
    return PASSWORD_URL.format(canary.PASSWORD, port)


def test_nothing_private_leaks_anywhere(place: Setup) -> None:
    host = place.host
    run = host.run(**place.settings)
    listener = run.await_events("http.listening")["listener"]

    _send_in_every_way(place, run)
    api = host.command("api", **{**place.settings, "API_ADDRESS": "127.0.0.1:0", "API_ALLOW_ANONYMOUS": "on"})
    place.output["the API's answers"] = ask_everything(api.await_events("api.started")["listener"])
    host.rabbit.publish(host.topology.queue, *BAD_BODIES[:2], b"\x1b]0;" + canary.RECIPIENT.encode())
    run.await_events("message.rejected", 3)
    _look_at_everything(place, listener)
    titles = [_title(pid) for pid in (*run.members(), *api.members())]
    posts = place.receiver.posted
    alerts = eventually(
        lambda: [each for each in posts if each.data["kind"] == "dead_letters"], "a webhook about dead letters"
    )
    assert {(alert.is_signed, alert.data["queue"]) for alert in alerts} == {(True, host.topology.dlq)}
    eventually(lambda: list(place.operators.mail_folder.glob("*.eml")), "an email to operators")
    for program in (api, run):
        program.send(signal.SIGTERM)
        assert program.await_exit() == 0

    dead_letters = [
        dead_letter for dead_letter in host.rabbit.read_all(host.topology.dlq) if not dead_letter.was_rejected
    ]
    assert dead_letters
    assert place.collector.bodies
    places: dict[str, bytes | str] = {
        **place.output,
        "process titles": b"\n".join(titles),
        "webhooks": b"\n".join(str(posted.headers).encode() + posted.body for posted in place.receiver.posted),
        "spans": b"\n".join(place.collector.bodies),
        "dead letters": "\n".join(f"{dead_letter.properties!r} {dead_letter.body!r}" for dead_letter in dead_letters),
        **{f"{each.pid} log": each.log for each in (run, api)},
        **{f"{each.pid} stderr": each.words for each in (run, api)},
        **canary.files_below(host.run_dir),
        **canary.files_below(place.operators.mail_folder),
        **canary.tables(host.database_url, of_content=False),
    }
    poison = {words: places.pop(words) for words in list(places) if "--poison" in words}
    assert canary.found_in(places) == []
    assert not [found for found in canary.found_in(poison) if found.startswith(("recipient", "sender"))]
    # The content tables contain canaries. This check proves that the search finds them.
    content = canary.found_in(canary.tables(host.database_url, of_content=True))
    assert {found.partition(" in ")[0] for found in content} >= {"recipient", "subject", "text", "html", "header"}


def _send_in_every_way(place: Setup, run: Program) -> None:
    """Enqueue one email for each possible result. The provider repeats the email's private values in each answer."""
    host, double = place.host, place.double
    host.await_finished(host.enqueue([canary.email("accepted")]))
    complaint = {"errors": [{"message": canary.ECHO, "field": "personalizations.0.to.0.email"}]}
    double.behave(reply={"status": 400, "body": complaint})
    host.await_finished(host.enqueue([canary.email("rejected")]))
    # SendGrid defers the email; SMTP accepts it.
    double.behave(reply={"status": 503, "body": complaint})
    host.await_finished(host.enqueue([canary.email("deferred")]))
    double.behave(act="close")
    host.await_finished(host.enqueue([canary.email("held")]))
    _kill_while_on_the_wire(place, run)
    # SendGrid refuses the account, and SMTP refuses the emails.
    place.sink.become("--login", f"postmaster:{canary.PASSWORD}", "--reply", f"end=554 5.6.0 {canary.ECHO}")
    double.behave(reply={"status": 401, "body": complaint})
    host.await_finished(host.enqueue([canary.email("refused")]))
    run.await_events("provider.paused", provider="sendgrid", state="open")
    place.sink.become("--reply", f"end=451 4.2.0 {canary.ECHO}", "--login", f"postmaster:{canary.PASSWORD}")
    host.await_finished(host.enqueue([canary.email("exhausted")]))
    place.sink.become("--login", "postmaster:another", "--reply", f"auth=535 5.7.8 {canary.LOGIN_ECHO}")
    host.enqueue([canary.email("waiting")])
    run.await_events("provider.paused", provider="smtp", state="open")
    # From here on, no email reaches a provider.
    double.behave(reply={"status": 401})


def _kill_while_on_the_wire(place: Setup, run: Program) -> None:
    seen = len(place.double.requests())
    place.double.behave(act="hang")
    ids = place.host.enqueue([canary.email("killed")])
    eventually(lambda: len(place.double.requests()) > seen, "an email on the wire")
    (owner,) = {place.host.rows()[email_id].locked_by for email_id in ids}
    assert owner is not None
    # Also search the ledgers of the running workers.
    with suppress(FileNotFoundError):
        place.output |= {f"{path} early": octets for path, octets in canary.files_below(place.host.run_dir).items()}
    run.send_to(int(owner.split(":")[2]), signal.SIGKILL)
    place.host.await_finished(ids)


def _title(pid: int) -> bytes:
    with suppress(OSError):  # the process may have exited
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _look_at_everything(place: Setup, listener: str) -> None:
    for page in ("/metrics", "/readyz", "/healthz"):
        place.output[page] = request(listener, "GET", page)[1]
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
    del place.output[" ".join(("dlq", "show", failed, "--reveal", *why))]
    place.command("held", "confirm", held, *why)
