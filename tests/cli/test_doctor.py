"""`dispatcher doctor`: its findings and their remedies."""

from __future__ import annotations

import json
import re
import resource
import secrets
import subprocess
import tempfile
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
from dispatcher.host.ledger import Ledger
from dispatcher.producers import enqueue
from tests.broker.rabbit import Operator
from tests.cli.commandline import DEADLINE_SECONDS, PROGRAM, CommandLine
from tests.events.requests import SendGridKey

AWAY = "127.0.0.1:1"
WRONG_LOGIN = re.compile(r"//[^@]*@")

LEDGERS: Final = "in-flight ledgers"


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because `doctor` reports that the emptied database commits asynchronously."""
    return own_database_url


def _findings(commandline: CommandLine, *, code: int) -> dict[str, dict[str, Any]]:
    ended = commandline.without_process("doctor", "--json")
    assert ended.code == code, ended
    assert ended.json["ok"] is (code == 0)
    return {finding["subject"]: finding for finding in ended.json["findings"]}


def test_every_check_passes(settled: CommandLine, servers: Servers) -> None:
    found = _findings(settled.having(DISPATCHER_RABBITMQ_MANAGEMENT_URL=servers.management_url), code=0)

    # The test's run directory is in /tmp or in memory, so doctor warns about it.
    assert {subject for subject, finding in found.items() if finding["state"] != "ok"} == {"run directory"}
    assert found.keys() == {
        *("settings", "Python", "file descriptors", "run directory"),
        *("PostgreSQL", "PostgreSQL durability", "PostgreSQL connections"),
        *("PostgreSQL sessions", "PostgreSQL commits"),
        *("PostgreSQL vacuum", "PostgreSQL collation"),
        *("tables", "indexes", "partitions", "producers' rights", "host names", "in-flight ledgers"),
        *(
            "RabbitMQ",
            "RabbitMQ management",
            "RabbitMQ topology",
            "RabbitMQ consumer timeout",
            "capabilities",
            "event sources",
            "provider capture",
        ),
    }


def test_two_connected_hosts_with_one_name_are_a_warning(prepared: CommandLine, database_url: str) -> None:
    with (
        psycopg.connect(database_url, application_name="dispatcher alerts twin"),
        psycopg.connect(database_url, application_name="dispatcher alerts twin"),
        psycopg.connect(database_url, application_name="dispatcher alerts alone"),
    ):
        found = _findings(prepared, code=0)["host names"]

    assert (found["state"], found["detail"]) == ("warning", "several connected hosts are named twin")
    assert "DISPATCHER_HOST_NAME" in found["remedy"]


def test_with_api_no_provider_secret_is_needed(prepared: CommandLine) -> None:
    """The API's env file lists the providers, but has no provider secrets."""
    settings = prepared.having(DISPATCHER_PROVIDERS="sendgrid", DISPATCHER_RUN_DIR="/proc/nowhere")

    findings = settings("doctor", "--api", "--json").json["findings"]

    assert [finding for finding in findings if finding["state"] == "failed"] == []
    assert "capabilities" in {finding["subject"] for finding in findings}
    assert settings("doctor").code == 1


def test_table_marks_each_finding_with_its_state(settled: CommandLine, servers: Servers) -> None:
    ended = settled.having(DISPATCHER_RABBITMQ_MANAGEMENT_URL=servers.management_url)("doctor")

    assert ended.code == 0
    marks = {line.split()[0]: line for line in ended.stdout.splitlines()}
    assert marks.keys() == {"✓", "!", "→"}
    assert "run directory" in marks["!"]  # the run directory is in /tmp or in memory


def test_without_settings_each_missing_one_is_a_finding(bare: CommandLine) -> None:
    ended = bare("doctor")

    assert ended.code == 1
    for variable in ("DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL", "DISPATCHER_PROVIDERS"):
        assert f"{variable} is not set" in ended.stdout


def test_an_unreachable_server_fails_with_a_remedy(settled: CommandLine) -> None:
    found = _findings(
        settled.having(
            DISPATCHER_DATABASE_URL=f"postgresql://u:secret@{AWAY}/x",
            DISPATCHER_AMQP_URL=f"amqp://u:secret@{AWAY}/",
            DISPATCHER_RABBITMQ_MANAGEMENT_URL=f"http://u:secret@{AWAY}",
            DISPATCHER_PROVIDERS="smtp",
            DISPATCHER_SMTP_URL=f"smtp://{AWAY}?tls=none",
        ),
        code=1,
    )

    for subject in ("PostgreSQL", "RabbitMQ", "RabbitMQ management"):
        assert found[subject]["state"] == "failed"
        assert found[subject]["remedy"]
        assert "secret" not in found[subject]["detail"]
    assert found["provider smtp"]["state"] == "failed"


@pytest.mark.parametrize("password", ["a@s3cret", "1/s3cret", "1#s3cret", "s3cret%zz"])
def test_no_part_of_a_wrongly_escaped_password_is_in_an_error(bare: CommandLine, password: str) -> None:
    login = f"ann:{password}@{AWAY}"
    commandline = bare.having(
        DISPATCHER_DATABASE_URL=f"postgresql://{login}/mail",
        DISPATCHER_AMQP_URL=f"amqp://{login}/",
        DISPATCHER_RABBITMQ_MANAGEMENT_URL=f"http://{login}",
        DISPATCHER_PROVIDERS="smtp",
        DISPATCHER_SMTP_URL=f"smtp://{login}?tls=none",
        DISPATCHER_RUN_DIR=str(bare.folder),
    )

    for ended in (commandline("doctor"), commandline("config"), commandline("status")):
        assert ended.code != 0 or ended.stdout
        assert "s3cret" not in ended.stdout + ended.stderr


def test_one_reachable_node_of_several_is_enough(settled: CommandLine, servers: Servers) -> None:
    place = urlsplit(servers.database_url).netloc.rpartition("@")[2]
    database = settled.environment["DISPATCHER_DATABASE_URL"].replace(place, f"{AWAY},{place}")
    found = _findings(
        settled.having(
            DISPATCHER_DATABASE_URL=f"{database}?target_session_attrs=read-write",
            DISPATCHER_AMQP_URL=f"amqp://u:secret@{AWAY}{urlsplit(servers.amqp_url).path},{servers.amqp_url}",
            DISPATCHER_RABBITMQ_MANAGEMENT_URL=f"http://u:secret@{AWAY},{servers.management_url}",
        ),
        code=0,
    )

    servers_found = [found[subject]["state"] for subject in ("PostgreSQL", "RabbitMQ", "RabbitMQ management")]
    assert servers_found == ["ok", "ok", "ok"]


def test_remedy_for_missing_tables_and_queues_is_init(unprepared: CommandLine, topology_names: Topology) -> None:
    found = _findings(unprepared, code=1)

    assert found["PostgreSQL"]["state"] == "ok"
    assert (found["tables"]["state"], found["tables"]["remedy"]) == ("failed", "Run `dispatcher init`.")
    assert (found["RabbitMQ"]["state"], found["RabbitMQ"]["remedy"]) == ("failed", "Run `dispatcher init`.")
    assert topology_names.exchange in found["RabbitMQ"]["detail"]


def test_queue_with_other_arguments_is_named(prepared: CommandLine, topology: Topology) -> None:
    found = _findings(prepared.having(DISPATCHER_QUEUE_TYPE="classic"), code=1)

    assert topology.dlq in found["RabbitMQ"]["detail"]


def test_without_a_management_api_the_topology_is_a_warning(settled: CommandLine) -> None:
    found = _findings(settled, code=0)

    assert found["RabbitMQ topology"]["state"] == "warning"
    assert "DISPATCHER_RABBITMQ_MANAGEMENT_URL" in found["RabbitMQ topology"]["remedy"]


def test_a_dlq_that_drops_messages_fails_and_stops_a_start(
    prepared: CommandLine, servers: Servers, topology: Topology
) -> None:
    operator = Operator(servers.management_url)
    managed = prepared.having(DISPATCHER_RABBITMQ_MANAGEMENT_URL=servers.management_url)
    with operator.policy(topology.dlq, {"max-length": 10}):
        found = _findings(managed, code=1)
        started = managed("run")

    words = f"The queue {topology.dlq} drops its oldest messages when it is full"
    assert found["RabbitMQ topology"]["detail"].startswith(words)
    assert started.code == 78
    assert words in started.stdout


def test_asynchronous_commit_fails(settled: CommandLine) -> None:
    lax = f"{settled.environment['DISPATCHER_DATABASE_URL']}?options=-c%20synchronous_commit%3Doff"

    found = _findings(settled.having(DISPATCHER_DATABASE_URL=lax), code=1)

    assert found["PostgreSQL durability"]["state"] == "failed"


def test_a_read_only_database_fails_and_run_waits_for_it(settled: CommandLine) -> None:
    read_only = settled.having(
        DISPATCHER_DATABASE_URL=f"{settled.environment['DISPATCHER_DATABASE_URL']}"
        "?options=-c%20default_transaction_read_only%3Don"
    )

    found = _findings(read_only, code=1)

    assert found["PostgreSQL commits"]["state"] == "failed"
    assert "read-only" in found["PostgreSQL commits"]["detail"]
    assert "default_transaction_read_only" in found["PostgreSQL commits"]["remedy"]
    with read_only.started("run", stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        assert b"store.connection_lost" in (line := run.stdout.readline())
        assert b"read-only" in line


def test_a_consumer_timeout_that_is_too_short_for_the_settings_is_a_warning(
    settled: CommandLine, servers: Servers
) -> None:
    found = _findings(
        settled.having(
            DISPATCHER_RABBITMQ_MANAGEMENT_URL=servers.management_url,
            DISPATCHER_SEND_TIMEOUT_SECONDS="600",
            DISPATCHER_DRAIN_SECONDS="900",
            DISPATCHER_MAX_ATTEMPTS="5",
            DISPATCHER_RETRY_BASE_SECONDS="100",
            DISPATCHER_RETRY_CAP_SECONDS="300",
        ),
        code=0,
    )

    assert found["RabbitMQ consumer timeout"]["state"] == "warning"
    assert "a worker may keep a message unacked for 5460 s" in found["RabbitMQ consumer timeout"]["detail"]


def test_a_limit_of_open_files_below_a_workers_needs_is_a_warning(settled: CommandLine) -> None:
    def allow_few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))

    with settled.started("doctor", "--json", preexec_fn=allow_few) as looking:
        stdout, _ = looking.communicate(timeout=DEADLINE_SECONDS)

    (found,) = (each for each in json.loads(stdout)["findings"] if each["subject"] == "file descriptors")
    assert found["state"] == "warning"
    assert found["detail"].startswith("the limit per process is 60")
    assert "Raise the hard limit" in found["remedy"]


def test_too_few_database_connections_for_the_workers_fails(settled: CommandLine) -> None:
    found = _findings(settled.having(DISPATCHER_WORKERS="256"), code=1)

    assert found["PostgreSQL connections"]["state"] == "failed"


def test_a_producer_that_can_read_hashes_of_payloads_is_a_warning(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    role = f"shop_{secrets.token_hex(4)}"
    connection.execute(f"create role {role}; grant select (payload_hash) on email_idempotency to {role}".encode())

    found = _findings(prepared, code=0)

    connection.execute(f"drop owned by {role}; drop role {role}".encode())
    assert found["producers' rights"]["state"] == "warning"
    assert role in found["producers' rights"]["detail"]
    assert "topology grants --exact" in found["producers' rights"]["remedy"]


def test_rows_in_a_default_partition_are_a_warning(prepared: CommandLine, connection: psycopg.Connection) -> None:
    connection.execute(
        "insert into email_log (email_id, tenant_id, message_key)"
        " values ('00000000-0000-7000-8000-000000000000', 't', 'k')"
    )

    found = _findings(prepared, code=0)

    assert found["partitions"]["state"] == "warning"
    assert "email_log_default" in found["partitions"]["detail"]


def test_a_changed_order_of_texts_fails_with_the_statements_that_rebuild_the_indexes(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    database = connection.info.dbname
    connection.execute("update pg_database set datcollversion = '0' where datname = current_database()")

    found = _findings(prepared, code=1)["PostgreSQL collation"]

    assert found["state"] == "failed"
    assert "its version was 0 when the indexes were built" in found["detail"]
    assert 'reindex schema concurrently "dispatcher"' in found["remedy"]
    assert f"alter database {database} refresh collation version" in found["remedy"]


def test_a_missing_index_is_a_warning_and_init_builds_it(prepared: CommandLine, connection: psycopg.Connection) -> None:
    connection.execute("drop index dispatcher.email_log_waiting")

    found = _findings(prepared, code=0)["indexes"]

    assert (found["state"], "email_log_waiting" in found["detail"]) == ("warning", True)
    assert "postgresql: built index email_log_waiting" in prepared("init").stdout
    assert _findings(prepared, code=0)["indexes"]["state"] == "ok"


def test_a_refused_login_names_its_setting_and_does_not_ask_to_start_the_server(
    settled: CommandLine, servers: Servers
) -> None:
    found = _findings(
        settled.having(
            DISPATCHER_DATABASE_URL=WRONG_LOGIN.sub("//nobody:secret@", settled.environment["DISPATCHER_DATABASE_URL"]),
            DISPATCHER_AMQP_URL=WRONG_LOGIN.sub("//nobody:secret@", servers.amqp_url),
            DISPATCHER_RABBITMQ_MANAGEMENT_URL=WRONG_LOGIN.sub("//nobody:secret@", servers.management_url),
        ),
        code=1,
    )

    for subject, setting in (
        ("PostgreSQL", "DISPATCHER_DATABASE_URL"),
        ("RabbitMQ", "DISPATCHER_AMQP_URL"),
        ("RabbitMQ management", "DISPATCHER_RABBITMQ_MANAGEMENT_URL"),
    ):
        assert re.search("user name or password|authentication failed", found[subject]["detail"])
        assert setting in found[subject]["remedy"]
        assert "Start it" not in found[subject]["remedy"]


def test_a_missing_database_is_reported_as_such_and_not_as_an_unreachable_server(settled: CommandLine) -> None:
    nowhere = settled.environment["DISPATCHER_DATABASE_URL"].rpartition("/")[0] + "/nowhere"

    found = _findings(settled.having(DISPATCHER_DATABASE_URL=nowhere), code=1)

    assert "name at the end of DISPATCHER_DATABASE_URL" in found["PostgreSQL"]["remedy"]


def test_suspicious_settings_are_a_warning(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_LEASE_SECONDS="10")("doctor")

    assert ended.code == 0
    assert "DISPATCHER_HANG_SECONDS" in ended.stdout


def test_unknown_variable_is_a_warning(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_WORKRS="4")("doctor")

    assert ended.code == 0
    assert "did you mean DISPATCHER_WORKERS?" in ended.stdout


def test_run_directory_that_cannot_be_created_fails(settled: CommandLine) -> None:
    (settled.folder / "file").touch()

    found = _findings(settled.having(DISPATCHER_RUN_DIR=str(settled.folder / "file" / "run")), code=1)

    assert found["run directory"]["state"] == "failed"


def test_a_ledger_of_another_database_or_an_unreadable_one_is_a_warning(settled: CommandLine) -> None:
    run_dir = settled.folder / "ledgers"
    ledger = Ledger(run_dir, worker="host:w0:17:cafe", slot="host:w0", slots=1)
    ledger.set_database(uuid4())
    assert "another database" in _findings(settled.having(DISPATCHER_RUN_DIR=str(run_dir)), code=0)[LEDGERS]["detail"]

    ledger.path.write_bytes(b"a dump")

    found = _findings(settled.having(DISPATCHER_RUN_DIR=str(run_dir)), code=0)[LEDGERS]
    assert (found["state"], "not an in-flight ledger" in found["detail"]) == ("warning", True)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("/tmp/email-dispatcher", "the system deletes old files in /tmp"),
        ("/var/tmp/mail/run", "the system deletes old files in /var/tmp"),
        ("/run/user/1000/email-dispatcher", "the system deletes old files in /run/user"),
        ("/run/email-dispatcher", "it is in memory (tmpfs), so a reboot empties it"),
        ("/var/lib/email-dispatcher", None),
        ("/tmpfiles/run", None),
        ("/run/disk/email-dispatcher", None),
    ],
)
def test_volatility_says_why_a_folder_loses_its_files(folder: str, words: str | None) -> None:
    mounts = "/dev/sda1 / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n/dev/sdb1 /run/disk ext4 rw 0 0\n"

    assert volatility(Path(folder), mounts) == words


def test_run_directory_in_tmp_is_a_warning(settled: CommandLine) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        found = _findings(settled.having(DISPATCHER_RUN_DIR=f"{folder}/run"), code=0)

    assert found["run directory"]["state"] == "warning"
    assert "the system deletes old files in /tmp" in found["run directory"]["detail"]


def test_run_directory_that_every_user_may_write_fails(settled: CommandLine) -> None:
    folder = settled.folder / "open to all"
    folder.mkdir()
    folder.chmod(0o777)

    found = _findings(settled.having(DISPATCHER_RUN_DIR=str(folder)), code=1)

    assert found["run directory"]["state"] == "failed"
    assert "every user" in found["run directory"]["detail"]


def test_a_disk_without_space_for_the_ledgers_fails(settled: CommandLine) -> None:
    limited = ["sh", "-c", 'ulimit -f 128 && exec "$@"', "sh", *PROGRAM, "doctor", "--json"]  # as on a full disk

    done = subprocess.run(limited, env=settled.whole_environment, cwd=settled.folder, capture_output=True, check=False)

    found = next(each for each in json.loads(done.stdout)["findings"] if each["subject"] == "run directory")
    assert (done.returncode, found["state"]) == (1, "failed")
    assert "File too large; the ledgers of" in found["detail"]
    assert "Free space on that disk" in found["remedy"]


def test_pending_emails_that_no_configured_provider_can_send_are_reported(prepared: CommandLine) -> None:
    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"]) as connection:
        enqueue(connection, Email(message_key="k", sender="shop@example.com", to="ann@example.org", template_id="d-1"))

    found = _findings(prepared, code=1)

    assert found["pending emails"]["state"] == "failed"
    assert (
        "1 of the oldest 1,000 pending emails will fail; the first: template_id needs a provider"
        in found["pending emails"]["detail"]
    )
    assert found["capabilities"]["detail"] == "no configured provider can send emails with a template"


def test_pending_emails_with_a_header_that_is_not_allowed_are_reported(prepared: CommandLine) -> None:
    header = "X-MC-Tags"
    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"]) as connection:
        email = Email(
            message_key="k",
            sender="shop@example.com",
            to="ann@example.org",
            subject="s",
            text="t",
            headers={header: "receipt"},
            allowed_headers=[header],
        )
        enqueue(connection, email)

    found = _findings(prepared, code=1)["pending emails"]

    assert "pending emails will fail; the first: headers.X-MC-Tags controls Mailchimp Transactional" in found["detail"]
    assert "DISPATCHER_ALLOWED_PROVIDER_HEADERS" in found["remedy"]
    assert "pending emails" not in _findings(prepared.having(DISPATCHER_ALLOWED_PROVIDER_HEADERS=header), code=0)


def test_pending_sms_to_a_country_that_is_not_allowed_are_reported(prepared: CommandLine) -> None:
    host = prepared.having(
        DISPATCHER_SMS_PROVIDERS="sms-capture", DISPATCHER_SMS_CAPTURE_DIR="sms", DISPATCHER_SMS_COUNTRIES="US,CA"
    )
    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"]) as connection:
        enqueue(connection, Sms(message_key="k", to="+18765551234", text="t"))

    found = _findings(host, code=1)

    assert found["countries of SMS"]["detail"].startswith("CA, US (DISPATCHER_SMS_COUNTRIES")
    assert "pending emails will fail; the first: its recipient is a number of JM" in found["pending emails"]["detail"]
    assert "pending emails" not in _findings(host.having(DISPATCHER_SMS_COUNTRIES="all"), code=0)


def test_the_state_of_a_circuit_breaker_is_named_although_the_provider_accepts_the_credentials(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at)"
        " values ('capture', 'host/1', 'open', 'connection_failed', clock_timestamp() + interval '1 minute')"
    )
    connection.commit()

    found = _findings(prepared, code=0)

    assert found["provider capture"]["state"] == "ok"
    assert found["circuit breaker"]["state"] == "warning"
    assert "capture: open in 1 worker; capture fails for every email" in found["circuit breaker"]["detail"]
    assert "`dispatcher resume provider capture`" in found["circuit breaker"]["detail"]


def test_doctor_lists_the_sources_of_providers_events(settled: CommandLine) -> None:
    key = SendGridKey().public
    configured = settled.having(
        DISPATCHER_SENDGRID_EVENTS_KEYS=f"{key},{key}",
        DISPATCHER_SES_EVENTS_TOPICS="arn:aws:sns:eu-west-1:123456789012:ses-events",
        DISPATCHER_SES_EVENTS_QUEUE_URL="https://sqs.eu-west-1.amazonaws.com/123456789012/ses-events",
    )

    assert _findings(settled, code=0)["event sources"]["detail"].startswith("none")
    assert _findings(configured, code=0)["event sources"]["detail"] == (
        "SendGrid posts to /v1/events/sendgrid (2 keys); SNS posts to /v1/events/ses (1 topic); "
        "the monitor polls DISPATCHER_SES_EVENTS_QUEUE_URL"
    )
