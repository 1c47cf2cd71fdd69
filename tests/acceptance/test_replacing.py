"""A reload, a worker's own request, or a hang replaces workers while they send. No email is affected."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tests.acceptance.harness import Host, Sink, emails, stop


def test_workers_are_replaced_under_load_by_a_reload_at_their_email_limit_and_without_their_ledgers(host: Host) -> None:
    host.sink("--latency-ms", "50")
    run = host.run(RECYCLE_EMAILS=150)
    host.await_consumers()
    ids = host.enqueue(emails(145))
    host.await_delivered(50)

    run.send(signal.SIGHUP)
    run.await_events("dispatcher.reloaded")
    host.await_finished(ids)
    before = set(host.run_dir.glob("*.ledger"))
    host.run_dir.rename(host.folder / "lost")  # at once; deletion file by file could meet a new file
    run.await_events("process.exited", 2, reason="recycled")
    assert {event["file"] for event in run.events("ledger.lost")} == {path.name for path in before}
    after = set(host.run_dir.glob("*.ledger"))
    assert len(after) == 2
    assert not after & before
    ids |= host.enqueue(emails(400, name="more"))  # at least one of two workers sends more than 180
    run.await_events("process.exited", 3, reason="recycled")

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 545}
    assert {event["reason"] for event in run.events("process.exited")} == {"reloaded", "recycled", "drained"}
    assert not list(host.run_dir.glob("*.ledger"))


def test_a_reload_reads_the_env_file_and_secrets_again_and_keeps_the_old_settings_after_a_mistake(host: Host) -> None:
    first, second = host.sink(), Sink(host.folder / "second")
    secret, file = host.folder / "smtp-url", host.folder / "dispatcher.env"
    secret.write_text(first.settings["SMTP_URL"])
    file.write_text(f"DISPATCHER_SMTP_URL_FILE={secret}\n")
    run = host.run(SMTP_URL="smtp://held.by.a.supervisor", ENV_FILE=file)
    host.await_finished(host.enqueue(emails(20, name="before")))

    secret.write_text("gopher://nowhere")
    run.send(signal.SIGHUP)
    reasons = [run.await_events("dispatcher.reload_failed")["reason"]]
    file.write_text(f"DISPATCHER_SMTP_URL={second.settings['SMTP_URL']}\nDISPATCHER_PREFETCH=many\n")
    run.send(signal.SIGHUP)
    reasons.append(run.await_events("dispatcher.reload_failed", 2)["reason"])
    file.write_text(f"DISPATCHER_SMTP_URL={second.settings['SMTP_URL']}\n")
    run.send(signal.SIGHUP)
    run.await_events("dispatcher.reloaded")
    after = host.enqueue(emails(20, name="after"))

    host.await_finished(after)
    stop(run)
    second.kill()
    assert [reason.partition(" must be")[0] for reason in reasons] == [
        f"{file}, line 1: DISPATCHER_SMTP_URL",
        f"{file}, line 2: DISPATCHER_PREFETCH",
    ]
    assert set(second.delivered()) == after
    assert not run.events("process.exited", reason="could_not_boot")


def test_a_reload_with_a_wrong_password_stops_no_worker(host: Host) -> None:
    host.sink()
    settings: dict[str, Any] = {}
    right: dict[Path, str] = {}
    for server in ("AMQP_URL", "DATABASE_URL"):
        settings |= {server: "", f"{server}_FILE": (secret := host.folder / server)}
        right[secret] = host.environment()[f"DISPATCHER_{server}"]
        secret.write_text(right[secret])
    run = host.run(**settings)
    host.await_finished(host.enqueue(emails(20, name="before")))

    for number, (secret, url) in enumerate(right.items()):
        parts = urlsplit(url)
        wrong = parts._replace(netloc=f"{parts.username}:no-longer@{parts.hostname}:{parts.port}")
        secret.write_text(urlunsplit(wrong))
        run.send(signal.SIGHUP)
        run.await_events("process.exited", 2 * (number + 1), reason="could_not_boot")
        host.await_finished(ids := host.enqueue(emails(20, name=f"meanwhile {number}")))
        assert {host.rows()[email_id].status for email_id in ids} == {"sent"}
        assert f"DISPATCHER_{secret.name}" in run.words
        secret.write_text(url)
    run.send(signal.SIGHUP)
    run.await_events("dispatcher.reloaded")

    stop(run)
    assert {event["reason"] for event in run.events("process.exited")} == {"could_not_boot", "reloaded", "drained"}
    assert "no-longer" not in run.words
