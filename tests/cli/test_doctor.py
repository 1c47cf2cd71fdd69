"""`dispatcher doctor`: its findings and their remedies."""

from __future__ import annotations

import re
import secrets
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.cli.checks import volatility
from dispatcher.dev.servers import Servers
from dispatcher.domain.email import Email
from dispatcher.domain.sms import Sms
from dispatcher.domain.webhook import new_secret
from dispatcher.host.ledger import Ledger
from dispatcher.producers import enqueue
from tests.broker.rabbit import Operator
from tests.cli.commandline import PROGRAM, CommandLine
from tests.events.requests import SendGridKey
from tests.store.books import Books

AWAY = "127.0.0.1:1"
WRONG_LOGIN = re.compile(r"//[^@]*@")
LEDGERS: Final = "in-flight ledgers"
EMAIL: Final[dict[str, Any]] = {"message_key": "k", "sender": "shop@example.com", "to": "ann@example.org"}


@pytest.fixture
def prepared(prepared: CommandLine, database_url: str) -> CommandLine:
    """`prepared`, with the usual commits of a server: the shared database commits asynchronously."""
    return prepared.having(DISPATCHER_DATABASE_URL=f"{database_url}?options=-c%20synchronous_commit%3Don")


@pytest.fixture
def managed(settled: CommandLine, servers: Servers) -> CommandLine:
    return settled.having(DISPATCHER_RABBITMQ_MANAGEMENT_URL=servers.management_url)


def _findings(commandline: CommandLine, *, code: int) -> dict[str, dict[str, Any]]:
    ended = commandline("doctor", "--json")
    assert ended.code == code, ended
    assert ended.json["ok"] is (code == 0)
    return {finding["subject"]: finding for finding in ended.json["findings"]}


def test_every_check_passes(managed: CommandLine) -> None:
    found = _findings(managed, code=0)
    ended = replace(managed, needs_process=True).having(PYTHONIOENCODING="ascii")("doctor")

    # The test's run directory is in /tmp or in memory, so doctor warns about it.
    assert {subject for subject, finding in found.items() if finding["state"] != "ok"} == {"run directory"}
    assert found.keys() == {
        *("settings", "Python", "file descriptors", "run directory"),
        *("PostgreSQL", "PostgreSQL durability", "PostgreSQL connections", "PostgreSQL sessions", "PostgreSQL commits"),
        *("PostgreSQL vacuum", "PostgreSQL collation"),
        *("tables", "indexes", "partitions", "producers' rights", "host names", "in-flight ledgers"),
        *("RabbitMQ", "RabbitMQ management", "RabbitMQ topology", "RabbitMQ consumer timeout"),
        *("capabilities", "event sources", "provider capture"),
    }
    assert (ended.code, ended.stdout[0]) == (0, "?")  # stdout takes only ASCII


def test_the_table_marks_each_finding_and_warns_of_suspicious_and_unknown_settings(managed: CommandLine) -> None:
    ended = managed.having(DISPATCHER_LEASE_SECONDS="10", DISPATCHER_WORKRS="4")("doctor")

    assert ended.code == 0
    lines = ended.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"✓", "!", "→"}
    for words in ("run directory", "DISPATCHER_HANG_SECONDS", "did you mean DISPATCHER_WORKERS?"):
        assert any(words in line for line in lines if line.startswith("!"))


SLOW = {"SEND_TIMEOUT_SECONDS": "600", "DRAIN_SECONDS": "900", "RETRY_BASE_SECONDS": "100", "RETRY_CAP_SECONDS": "300"}
KEY: Final = SendGridKey().public
EVENTS: Final = {
    "SENDGRID_EVENTS_KEYS": f"{KEY},{KEY}",
    "RESEND_EVENTS_SECRETS": new_secret(),
    "SES_EVENTS_TOPICS": "arn:aws:sns:eu-west-1:123456789012:ses-events",
    "SES_EVENTS_QUEUE_URL": "https://sqs.eu-west-1.amazonaws.com/123456789012/ses-events",
}
SOURCES: Final = (
    "SendGrid posts to /v1/events/sendgrid (2 keys); SNS posts to /v1/events/ses (1 topic); "
    "Resend posts to /v1/events/resend (1 secret); the monitor"
)


def test_settings_have_findings(managed: CommandLine) -> None:
    url = managed.environment["DISPATCHER_DATABASE_URL"]
    given: dict[str, str | None] = {"DATABASE_URL": f"{url}?options=-c%20synchronous_commit%3Doff"}
    given |= {"RABBITMQ_MANAGEMENT_URL": None, "WORKERS": "256", "RUN_DIR": "/proc/nowhere/run", **EVENTS}
    given |= {"PROVIDERS": "smtp", "SMTP_URL": f"smtp://{AWAY}?tls=none"}
    (folder := managed.folder / "open to all").mkdir()
    folder.chmod(0o777)
    gone = {"DATABASE_URL": f"{url}_gone", "MAX_ATTEMPTS": "5", "RUN_DIR": str(folder), **SLOW}
    changed, slow = [
        _findings(managed.having(**{f"DISPATCHER_{name}": value for name, value in each.items()}), code=1)
        for each in (given, gone)
    ]

    for found, subject, state, words in (
        (changed, "RabbitMQ topology", "warning", "Set DISPATCHER_RABBITMQ_MANAGEMENT_URL"),
        (changed, "PostgreSQL durability", "failed", ""),
        (changed, "PostgreSQL connections", "failed", ""),
        (changed, "run directory", "failed", ""),
        (changed, "provider smtp", "failed", ""),
        (changed, "event sources", "ok", f"{SOURCES} polls DISPATCHER_SES_EVENTS_QUEUE_URL"),
        (slow, "PostgreSQL", "failed", "name at the end of DISPATCHER_DATABASE_URL"),
        (slow, "RabbitMQ consumer timeout", "warning", "keep a message unacked for 5460 s"),
        (slow, "event sources", "ok", "none"),
        (slow, "run directory", "failed", "every user"),
    ):
        assert found[subject]["state"] == state
        assert words in f"{found[subject]['detail']} {found[subject]['remedy']}"


def test_hosts_with_one_name_and_a_circuit_breaker_are_warnings(
    prepared: CommandLine, connection: psycopg.Connection, database_url: str
) -> None:
    connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at)"
        " values ('capture', 'host/1', 'open', 'connection_failed', clock_timestamp() + interval '1 minute')"
    )
    with (
        psycopg.connect(database_url, application_name="dispatcher alerts twin"),
        psycopg.connect(database_url, application_name="dispatcher alerts twin"),
        psycopg.connect(database_url, application_name="dispatcher alerts alone"),
    ):
        found = _findings(prepared, code=0)

    names, breaker = found["host names"], found["circuit breaker"]
    assert (names["state"], names["detail"]) == ("warning", "several connected hosts are named twin")
    assert "DISPATCHER_HOST_NAME" in names["remedy"]
    assert (found["provider capture"]["state"], breaker["state"]) == ("ok", "warning")
    assert "capture: open in 1 worker; capture fails for every email" in breaker["detail"]
    assert "`dispatcher resume provider capture`" in breaker["detail"]


def test_a_host_that_allows_other_recipients_than_another_host_is_a_fault(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into host_presence (holder, host, seen_at, recipients) values"
        " ('a', 'staging-2', clock_timestamp(), ''), ('b', 'gone', clock_timestamp() - interval '2 hours', 'x')"
    )
    staging = prepared.having(DISPATCHER_ALLOW_RECIPIENTS="example.org, +4915")

    found = _findings(staging, code=1)

    assert "only to example.org, +4915; emails to all others are kept back" in found["recipients"]["detail"]
    assert "this host and staging-2 do not" in found["recipients of all hosts"]["detail"]
    for wrong in ("", "example", "ann@", "+49x", "none, example.org"):
        ended = prepared.having(DISPATCHER_ALLOW_RECIPIENTS=wrong)("doctor")
        fault = "has an entry whose" if wrong else "must have at least one address"
        assert f"DISPATCHER_ALLOW_RECIPIENTS {fault}" in ended.stdout


def test_with_api_no_provider_secret_is_needed(settled: CommandLine) -> None:
    """The API's env file lists the providers, but has no provider secrets."""
    settings = settled.having(DISPATCHER_PROVIDERS="sendgrid", DISPATCHER_RUN_DIR="/proc/nowhere")

    findings = settings("doctor", "--api", "--json").json["findings"]

    assert [finding for finding in findings if finding["state"] == "failed"] == []
    assert "capabilities" in {finding["subject"] for finding in findings}
    assert settings("doctor").code == 1


SERVERS = {
    "PostgreSQL": "DISPATCHER_DATABASE_URL",
    "RabbitMQ": "DISPATCHER_AMQP_URL",
    "RabbitMQ management": "DISPATCHER_RABBITMQ_MANAGEMENT_URL",
}


def test_an_unreachable_server_and_a_refused_login_fail_with_different_remedies(managed: CommandLine) -> None:
    urls = {variable: managed.environment[variable] for variable in SERVERS.values()}
    away = {name: re.sub("//[^/]*/?", f"//u:secret@{AWAY}/", url) for name, url in urls.items()}
    refused = {name: WRONG_LOGIN.sub("//nobody:secret@", url) for name, url in urls.items()}

    unreachable, wrong = _findings(managed.having(**away), code=1), _findings(managed.having(**refused), code=1)

    for subject, setting in SERVERS.items():
        assert (unreachable[subject]["state"], bool(unreachable[subject]["remedy"])) == ("failed", True)
        assert "secret" not in unreachable[subject]["detail"] + wrong[subject]["detail"]
        assert re.search("user name or password|authentication failed", wrong[subject]["detail"])
        assert setting in wrong[subject]["remedy"]
        assert "Start it" not in wrong[subject]["remedy"]


@pytest.mark.parametrize("password", ["a@s3cret", "1/s3cret", "1#s3cret", "s3cret%zz"])
def test_no_part_of_a_wrongly_escaped_password_is_in_an_error(bare: CommandLine, password: str) -> None:
    login = f"ann:{password}@{AWAY}"
    commandline = bare.having(
        DISPATCHER_DATABASE_URL=f"postgresql://{login}/mail",
        DISPATCHER_AMQP_URL=f"amqp://{login}/",
        DISPATCHER_RABBITMQ_MANAGEMENT_URL=f"http://{login}",
        DISPATCHER_PROVIDERS="smtp",
        DISPATCHER_SMTP_URL=f"smtp://{login}?tls=none",
    )

    for ended in (commandline("doctor"), commandline("config"), commandline("status")):
        assert ended.code != 0 or ended.stdout
        assert "s3cret" not in ended.stdout + ended.stderr


def test_one_reachable_node_of_several_is_enough(settled: CommandLine, servers: Servers) -> None:
    place = urlsplit(servers.database_url).netloc.rpartition("@")[2]
    database = settled.environment["DISPATCHER_DATABASE_URL"].replace(place, f"{AWAY},{place}")
    several = {
        "DISPATCHER_DATABASE_URL": f"{database}?target_session_attrs=read-write",
        "DISPATCHER_AMQP_URL": f"amqp://u:secret@{AWAY}{urlsplit(servers.amqp_url).path},{servers.amqp_url}",
        "DISPATCHER_RABBITMQ_MANAGEMENT_URL": f"http://u:secret@{AWAY},{servers.management_url}",
    }

    found = _findings(settled.having(**several), code=0)

    assert [found[subject]["state"] for subject in SERVERS] == ["ok", "ok", "ok"]


def test_remedy_for_missing_tables_and_queues_is_init(unprepared: CommandLine, topology_names: Topology) -> None:
    found = _findings(unprepared, code=1)

    assert found["PostgreSQL"]["state"] == "ok"
    for subject in ("tables", "RabbitMQ"):
        assert (found[subject]["state"], found[subject]["remedy"]) == ("failed", "Run `dispatcher init`.")
    assert topology_names.exchange in found["RabbitMQ"]["detail"]


def test_an_unsafe_queue_fails_and_stops_a_start(prepared: CommandLine, servers: Servers, topology: Topology) -> None:
    managed = prepared.having(DISPATCHER_RABBITMQ_MANAGEMENT_URL=servers.management_url)
    other = prepared.having(DISPATCHER_QUEUE_TYPE="classic")
    with Operator(servers.management_url).policy(topology.dlq, {"max-length": 10}):
        found = _findings(managed, code=1)
        started = managed("run")
    different, refused = _findings(other, code=1), other("run")

    words = f"The queue {topology.dlq} drops its oldest messages when it is full"
    assert found["RabbitMQ topology"]["detail"].startswith(words)
    assert (started.code, words in started.stdout) == (78, True)
    assert topology.dlq in different["RabbitMQ"]["detail"]
    assert (refused.code, topology.dlq in refused.refusals[0]) == (78, True)


def test_a_read_only_database_fails_and_run_waits_for_it(settled: CommandLine) -> None:
    url = f"{settled.environment['DISPATCHER_DATABASE_URL']}?options=-c%20default_transaction_read_only%3Don"
    read_only = settled.having(DISPATCHER_DATABASE_URL=url)

    found = _findings(read_only, code=1)["PostgreSQL commits"]

    assert (found["state"], "read-only" in found["detail"]) == ("failed", True)
    assert "default_transaction_read_only" in found["remedy"]
    with read_only.started("run", stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        assert b"store.connection_lost" in (line := run.stdout.readline())
        assert b"read-only" in line


def test_faults_of_tables_are_found_with_what_mends_them(prepared: CommandLine, own_database_url: str) -> None:
    host = prepared.having(DISPATCHER_DATABASE_URL=own_database_url)
    connection = psycopg.connect(own_database_url, autocommit=True)
    role, database = f"shop_{secrets.token_hex(4)}", connection.info.dbname
    connection.execute(f"create role {role}; grant select (payload_hash) on email_idempotency to {role}".encode())
    connection.execute(
        "insert into email_log (email_id, tenant_id, message_key)"
        " values ('00000000-0000-7000-8000-000000000000', 't', 'k')"
    )
    connection.execute("drop index dispatcher.email_log_waiting")
    found = _findings(host, code=0)
    connection.execute(f"drop owned by {role}; drop role {role}".encode())
    built = host("init").stdout
    connection.execute("update pg_database set datcollversion = '0' where datname = current_database()")
    after = _findings(host, code=1)
    connection.close()

    for subject, words, remedy in (
        ("producers' rights", role, "topology grants --exact"),
        ("partitions", "email_log_default", "dispatcher init"),
        ("indexes", "email_log_waiting", "dispatcher init"),
    ):
        assert (found[subject]["state"], words in found[subject]["detail"]) == ("warning", True)
        assert remedy in found[subject]["remedy"]
    assert "postgresql: built index email_log_waiting" in built
    assert after["indexes"]["state"] == "ok"
    collation = after["PostgreSQL collation"]
    assert collation["state"] == "failed"
    assert "its version was 0 when the indexes were built" in collation["detail"]
    assert 'reindex schema concurrently "dispatcher"' in collation["remedy"]
    assert f"alter database {database} refresh collation version" in collation["remedy"]


def test_a_ledger_of_another_database_or_an_unreadable_one_is_a_warning(settled: CommandLine) -> None:
    run_dir = settled.folder / "ledgers"
    ledger = Ledger(run_dir, worker="host:w0:17:cafe", slot="host:w0", slots=1)
    ledger.set_database(uuid4())
    assert "another database" in _findings(settled.having(DISPATCHER_RUN_DIR=str(run_dir)), code=0)[LEDGERS]["detail"]

    ledger.path.write_bytes(b"a dump")

    found = _findings(settled.having(DISPATCHER_RUN_DIR=str(run_dir)), code=0)[LEDGERS]
    assert (found["state"], "not an in-flight ledger" in found["detail"]) == ("warning", True)


def test_volatility_says_why_a_folder_loses_its_files() -> None:
    mounts = "/dev/sda1 / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n/dev/sdb1 /run/disk ext4 rw 0 0\n"

    for folder, words in {
        "/tmp/email-dispatcher": "the system deletes old files in /tmp",
        "/var/tmp/mail/run": "the system deletes old files in /var/tmp",
        "/run/user/1000/email-dispatcher": "the system deletes old files in /run/user",
        "/run/email-dispatcher": "it is in memory (tmpfs), so a reboot empties it",
        **dict.fromkeys(("/var/lib/email-dispatcher", "/tmpfiles/run", "/run/disk/email-dispatcher")),
    }.items():
        assert volatility(Path(folder), mounts) == words


def test_a_disk_without_space_for_the_ledgers_fails_and_too_few_open_files_are_a_warning(settled: CommandLine) -> None:
    limited = ("sh", "-c", 'ulimit -f 128 && ulimit -n 60 && exec "$@"', "sh", *PROGRAM)  # as on a full disk

    found = _findings(replace(settled, program=limited, needs_process=True), code=1)

    disk, files = found["run directory"], found["file descriptors"]
    assert (disk["state"], files["state"]) == ("failed", "warning")
    assert "File too large; the ledgers of" in disk["detail"]
    assert "Free space on that disk" in disk["remedy"]
    assert files["detail"].startswith("the limit per process is 60")
    assert "Raise the hard limit" in files["remedy"]


TAG: Final[dict[str, Any]] = {"headers": {"X-MC-Tags": "receipt"}, "allowed_headers": ["X-MC-Tags"]}
SMS: Final = Sms(message_key="k", to="+18765551234", text="t")
WILL_FAIL: Final = {
    "template": (Email(**EMAIL, template_id="d-1"), "template_id needs a provider", "PROVIDERS", None),
    "header": (Email(**EMAIL, text="t", **TAG), "headers.X-MC-Tags controls", "ALLOWED_PROVIDER_HEADERS", "X-MC-Tags"),
    "country": (SMS, "its recipient is a number of JM", "SMS_COUNTRIES", "all"),
}


@pytest.mark.parametrize(("email", "words", "variable", "mended"), WILL_FAIL.values(), ids=list(WILL_FAIL))
def test_pending_emails_that_will_fail_are_reported(
    prepared: CommandLine, tables: Books, email: Email | Sms, words: str, variable: str, mended: str | None
) -> None:
    sms = {"SMS_PROVIDERS": "sms-capture", "SMS_CAPTURE_DIR": "sms", "SMS_COUNTRIES": "US,CA"}
    host = prepared.having(**{f"DISPATCHER_{name}": value for name, value in sms.items()})
    enqueue(tables.connection, email)

    found = _findings(host, code=1)

    pending = found["pending emails"]
    assert pending["state"] == "failed"
    assert f"1 of the oldest 1,000 pending emails will fail; the first: {words}" in pending["detail"]
    assert f"DISPATCHER_{variable}" in pending["remedy"]
    assert found["capabilities"]["detail"] == "no configured provider can send emails with a template"
    assert found["countries of SMS"]["detail"].startswith("CA, US (DISPATCHER_SMS_COUNTRIES")
    if mended:
        assert "pending emails" not in _findings(host.having(**{f"DISPATCHER_{variable}": mended}), code=0)
