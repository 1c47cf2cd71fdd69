"""A reload, a worker's own request, or a hang replaces workers while they send. No email is affected."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.acceptance.harness import CONNECTIONS, Host, Sink, emails, stop


def test_a_reload_under_load_loses_repeats_and_holds_nothing(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(600))
    run = host.run()
    host.await_delivered(50)

    run.send(signal.SIGHUP)
    run.await_events("dispatcher.reloaded")

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 600}
    assert {event["reason"] for event in run.events("process.exited")} == {"reloaded", "drained"}
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


@pytest.mark.parametrize("server", ["AMQP_URL", "DATABASE_URL"])
def test_a_reload_with_a_wrong_password_stops_no_worker(host: Host, server: str) -> None:
    host.sink()
    right = host.environment()[f"DISPATCHER_{server}"]
    parts = urlsplit(right)
    secret = host.folder / "url"
    secret.write_text(right)
    settings: dict[str, Any] = {server: "", f"{server}_FILE": secret}
    run = host.run(**settings)
    host.await_finished(host.enqueue(emails(20, name="before")))

    secret.write_text(urlunsplit(parts._replace(netloc=f"{parts.username}:no-longer@{parts.hostname}:{parts.port}")))
    run.send(signal.SIGHUP)
    run.await_events("process.exited", 2, reason="could_not_boot")
    books = host.await_finished(host.enqueue(emails(20, name="meanwhile")))
    secret.write_text(right)
    run.send(signal.SIGHUP)
    run.await_events("dispatcher.reloaded")

    stop(run)
    assert books.counts == {"sent": 20}
    assert {event["reason"] for event in run.events("process.exited")} == {"could_not_boot", "reloaded", "drained"}
    assert f"DISPATCHER_{server}" in run.words
    assert "no-longer" not in run.words


def test_workers_that_reach_their_email_limit_are_replaced_one_by_one(host: Host) -> None:
    host.sink("--latency-ms", "5")
    run = host.run(RECYCLE_EMAILS=50)
    host.await_consumers()  # so that RabbitMQ gives each worker its share

    ids = host.enqueue(emails(400))

    run.await_events("process.exited", 2, reason="recycled")
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 400}


def test_workers_whose_ledgers_are_deleted_are_replaced(host: Host) -> None:
    host.sink("--latency-ms", "5")
    run = host.run()
    host.await_consumers()
    ids = host.enqueue(emails(400))
    before = set(host.run_dir.glob("*.ledger"))

    shutil.rmtree(host.run_dir)

    run.await_events("process.exited", 2, reason="recycled")
    assert {event["file"] for event in run.events("ledger.lost")} == {path.name for path in before}
    after = set(host.run_dir.glob("*.ledger"))
    assert len(after) == 2
    assert not after & before
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 400}


@pytest.mark.slow
def test_a_hung_worker_is_replaced_and_only_its_in_flight_emails_are_held(host: Host) -> None:
    host.sink("--latency-ms", "50")
    ids = host.enqueue(emails(600))
    run = host.run(HANG_SECONDS=5)
    host.await_delivered(100)
    victim = run.pid_of("worker 0")

    os.kill(victim, signal.SIGSTOP)

    ended = run.await_events("process.exited", pid=victim)
    assert (ended["reason"], ended["exit_status"]) == ("hung", "signal SIGKILL")
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.count("held") <= CONNECTIONS
    assert books.count("sent") + books.count("held") == 600
