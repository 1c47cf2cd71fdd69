"""The checks of `dispatcher doctor`. Each check yields findings, and all checks run, even if one fails."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import resource
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID

from dispatcher.cli.output import counted
from dispatcher.config import Settings
from dispatcher.errors import ConfigurationError, DispatcherError, ServerUnavailable
from dispatcher.host.ledger_format import SUFFIX, file_octets
from dispatcher.host.ledger_reader import living_ledger
from dispatcher.supervisor.run_dir import run_dir_fault

if TYPE_CHECKING:
    from dispatcher.broker.management import Management
    from dispatcher.broker.topology import Topology
    from dispatcher.cli.env_file import EnvFile
    from dispatcher.store.connections import Session
    from dispatcher.store.old_transactions import OldTransaction

OLDEST_POSTGRESQL: Final = 14
_COLLATION_VERSIONS: Final = 150_000
"""The first version of PostgreSQL that records the version of a database's collation."""
OLDEST_PYTHON: Final = (3, 11)
SPARE_CONNECTIONS: Final = 10
"""How many PostgreSQL connections are needed in addition to those of the workers: connections of the relay, the monitor
and commands, and connections that are reserved for superusers."""
CLEANED_FOLDERS: Final = ("/tmp", "/var/tmp", "/run/user")  # noqa: S108 - doctor warns of them
"""Folders in which the system deletes old files, or the files of users who have logged out."""
SPARE_DESCRIPTORS: Final = 64
"""How many file descriptors a worker needs in addition to those for its providers: descriptors for logs, pipes,
PostgreSQL and RabbitMQ."""
_START: Final = "Start the server, or correct {variable}. For development, `dispatcher dev up` starts a private server."

_SYNCHRONOUS: Final = (
    "Set synchronous_standby_names on the primary. The promotion of an asynchronous standby loses recent commits. "
    "Emails whose results were in lost commits become held."
)


class CheckState(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """Sending works, but with a risk or a limit."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `dispatcher doctor`: what was checked, what the check found, and how to fix the problem."""

    subject: str
    state: CheckState
    detail: str
    remedy: str | None = None


def passed(subject: str, words: str) -> Finding:
    return Finding(subject, CheckState.OK, words)


def failed(subject: str, error: DispatcherError, remedy: str | None = None) -> Finding:
    """A finding about an error; `remedy` is for an error without a remedy."""
    words = " ".join(error.mistakes) if isinstance(error, ConfigurationError) else error.message
    return Finding(subject, CheckState.FAILED, words, error.remedy or remedy)


def passed_if(
    condition: bool, subject: str, words: str, remedy: str, otherwise: CheckState = CheckState.FAILED
) -> Finding:
    return passed(subject, words) if condition else Finding(subject, otherwise, words, remedy)


def check_env_file(file: EnvFile) -> Finding:
    """Warns if the env file has secrets and every user of this machine can read it."""
    secrets = file.secrets
    is_open = bool(secrets and file.path.stat().st_mode & stat.S_IROTH)
    risk = f"every user of this machine can read {file.path}, which contains secrets ({', '.join(secrets)})"
    remedy = f"Run: chmod o= {file.path}. The user of `dispatcher run` must still be able to read the file."
    return passed_if(not is_open, "env file", risk if is_open else f"{file.path}", remedy, CheckState.WARNING)


def check_process(settings: Settings) -> Iterator[Finding]:
    """Checks Python's version and the open-file limit."""
    from dispatcher.providers.registry import max_connections

    oldest = ".".join(map(str, OLDEST_PYTHON))
    is_new = sys.version_info >= OLDEST_PYTHON
    yield passed_if(is_new, "Python", platform.python_version(), f"Install Python {oldest} or newer.")
    # Only the hard limit counts, because `run` and `api` raise their soft limit to it.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sum(max_connections(name, settings) for name in settings.providers) + SPARE_DESCRIPTORS
    is_enough = limit == resource.RLIM_INFINITY or limit >= needed
    words = f"the limit per process is {limit}; a worker may need {needed}"
    remedy = f"Raise the hard limit to {2 * needed}: LimitNOFILE (systemd), minfds (supervisord.conf) or ulimit -Hn."
    yield passed_if(is_enough, "file descriptors", words, remedy, CheckState.WARNING)


def check_recipients(settings: Settings) -> Iterator[Finding]:
    """Reports that this host does not send to everyone, which the operator of a production host must know; and other
    hosts that allow other recipients."""
    from dispatcher.store.connections import connected
    from dispatcher.store.server import find_other_recipients

    if settings.allow_recipients is not None or settings.redirect_to is not None:
        allowed = ", ".join(settings.allow_recipients or ()) or "nobody"
        others = f"redirected to {settings.redirect_to}" if settings.redirect_to else "kept back"
        words = f"this host sends only to {allowed}; emails to all others are {others}"
        remedy = "Correct for staging, if every host has the same settings. Otherwise unset DISPATCHER_ALLOW_RECIPIENTS"
        yield Finding("recipients", CheckState.WARNING, words, f"{remedy} and DISPATCHER_REDIRECT_TO.")
    different: list[str] = []
    if settings.database_url:
        with suppress(DispatcherError), connected(settings.database_url, name="dispatcher doctor") as connection:
            different = find_other_recipients.sync(connection, settings.recipients_digest)
    if different:
        words = f"this host and {', '.join(different)} do not have the same DISPATCHER_ALLOW_RECIPIENTS and REDIRECT_TO"
        remedy = "Set the same values on all hosts: a host without them sends what another host keeps back."
        yield Finding("recipients of all hosts", CheckState.FAILED, words, remedy)


def check_senders(settings: Settings) -> Iterator[Finding]:
    """Checks the DNS records of the senders' domains: of DISPATCHER_SENDER_DOMAINS, and of valid API keys."""
    from dispatcher.ops.sender_dns import examine
    from dispatcher.store.api_keys import ApiKey, list_keys
    from dispatcher.store.connections import connected

    keys: list[ApiKey] = []
    if settings.database_url:
        with suppress(DispatcherError), connected(settings.database_url, name="dispatcher doctor") as connection:
            keys = list_keys.sync(connection)
    for each in examine(settings, keys):
        state = CheckState.OK if each.is_ok else CheckState.WARNING
        yield Finding(f"{each.subject} of {each.domain}", state, each.detail, each.remedy)


def check_run_dir(settings: Settings) -> Iterator[Finding]:
    """Checks that only this user may write there, that the in-flight ledgers fit on the disk, and that the system does
    not delete them."""
    subject = "run directory"
    needed = settings.workers * file_octets(2 * settings.prefetch)
    try:
        settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if fault := run_dir_fault(settings.run_dir):
            yield Finding(subject, CheckState.FAILED, f"{settings.run_dir} {fault.words}", fault.remedy)
            return
        with tempfile.TemporaryFile(dir=settings.run_dir) as file:
            os.posix_fallocate(file.fileno(), 0, needed)
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            mounts = ""
        doubt = volatility(settings.run_dir.resolve(), mounts)
        remedy = "Set DISPATCHER_RUN_DIR to a folder on a disk of this host, such as /var/lib/email-dispatcher."
        words = f"{settings.run_dir} is writable{', but ' + doubt if doubt else ''}"
        yield passed_if(not doubt, subject, words, remedy, CheckState.WARNING)
    except OSError as error:
        words = f"{settings.run_dir}: {error.strerror}"
        remedy = "Set DISPATCHER_RUN_DIR to a folder that this user may write."
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            words += f"; the ledgers of {settings.workers} workers need {needed / 2**20:.1f} MiB"
            remedy = "Free space on that disk, or set DISPATCHER_RUN_DIR to a folder on another disk of this host."
        yield Finding(subject, CheckState.FAILED, words, remedy)


def volatility(folder: Path, mounts: str) -> str | None:
    """Why ledgers in a folder (without symbolic links) may be lost before the relay has settled their emails; None if
    they are safe. `mounts` is the text of /proc/mounts."""
    for cleaned in CLEANED_FOLDERS:
        if folder.is_relative_to(cleaned):
            return f"the system deletes old files in {cleaned}"
    # Each line begins with a device, a mount point and a type. If several mount points contain the folder, the longest
    # path counts. If several lines have this mount point, the last line counts.
    entries = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    enclosing = [(len(mount_point), kind) for mount_point, kind in entries if folder.is_relative_to(mount_point)]
    _, kind = max(reversed(enclosing), key=lambda each: each[0], default=(0, ""))
    return f"it is in memory ({kind}), so a reboot empties it" if kind in ("tmpfs", "ramfs") else None


def check_postgresql(settings: Settings) -> Iterator[Finding]:
    """Checks PostgreSQL: its version, durability, number of connections and tables, and whether a write commits."""
    from dispatcher.store.connections import connected
    from dispatcher.store.old_transactions import find_oldest_transaction
    from dispatcher.store.server import show_server
    from dispatcher.store.statements import fetch_sync
    from dispatcher.worker.process import POOL_SIZE

    try:
        with connected(settings.database_url, name="dispatcher doctor") as connection:
            server = show_server.sync(connection)
            words = f"{server.version} is reachable; {OLDEST_POSTGRESQL} is the oldest supported version"
            is_new = server.version_number >= OLDEST_POSTGRESQL * 10_000
            yield passed_if(is_new, "PostgreSQL", words, f"Upgrade PostgreSQL to {OLDEST_POSTGRESQL} or newer.")
            words = f"fsync is {server.fsync}, synchronous_commit is {server.synchronous_commit}"
            is_durable = server.fsync == "on" and server.synchronous_commit != "off"
            remedy = "Turn on fsync and synchronous_commit: otherwise a crash loses emails."
            yield passed_if(is_durable, "PostgreSQL durability", words, remedy)
            if server.standby_count:
                is_synchronous = bool(server.standby_names)
                waits = "commits wait for a standby" if is_synchronous else "commits do not wait for a standby"
                words = f"{server.standby_count} connected; {waits}"
                yield passed_if(is_synchronous, "PostgreSQL standbys", words, _SYNCHRONOUS, CheckState.WARNING)
            limit, needed = server.max_connections, settings.workers * POOL_SIZE + SPARE_CONNECTIONS
            workers = counted(settings.workers, "worker")
            words = f"max_connections is {limit}; this host needs {needed} for {workers}"
            remedy = "Raise max_connections, or lower DISPATCHER_WORKERS."
            yield passed_if(limit >= needed, "PostgreSQL connections", words, remedy)
            yield old_transaction_finding(find_oldest_transaction.sync(connection))
            if server.version_number >= _COLLATION_VERSIONS:
                before, now, database = fetch_sync(connection, "find_collation_versions")[0]
                words = f"its version was {before} when the indexes were built, and is {now}"
                remedy = (
                    "Searches by tenant or lane may miss emails; message keys are not affected. Run: reindex schema "
                    f'concurrently "{settings.database_schema}"; the same for the database\'s other schemas; then: '
                    f"alter database {database} refresh collation version"
                )
                yield passed_if(before == now, "PostgreSQL collation", words, remedy)
            yield from _check_tables(settings, connection)
        yield from _check_sessions(settings)
    except DispatcherError as error:
        yield failed("PostgreSQL", error, _START.format(variable="DISPATCHER_DATABASE_URL"))


def _check_sessions(settings: Settings) -> Iterator[Finding]:
    from dispatcher.store.server import time_commit, verify_sessions

    try:
        asyncio.run(verify_sessions(settings.database_url, name="dispatcher doctor"))
        yield passed("PostgreSQL sessions", "each connection keeps its session, as locks and notifications require")
    except ConfigurationError as error:
        yield failed("PostgreSQL sessions", error)
        # Leave out `time_commit`: it changes settings of its session. If the session is shared, other clients would get
        # these settings.
        return
    try:
        seconds = asyncio.run(time_commit(settings.database_url, name="dispatcher doctor"))
        yield passed("PostgreSQL commits", f"connected and committed a small write in {seconds:.2f} s")
    except DispatcherError as error:
        yield failed("PostgreSQL commits", error)


def old_transaction_finding(old: OldTransaction | None) -> Finding:
    """Warns of what keeps VACUUM from removing old row versions."""
    words = f"VACUUM cannot remove old row versions, because of {old}" if old else "VACUUM can remove old row versions"
    return passed_if(not old, "PostgreSQL vacuum", words, old.remedy if old else "", CheckState.WARNING)


def _check_tables(settings: Settings, connection: Session) -> Iterator[Finding]:
    from dispatcher.store.alerts import list_shared_host_names
    from dispatcher.store.indexes import lasting_indexes
    from dispatcher.store.migrations import all_migrations, find_valid_indexes, verify_schema
    from dispatcher.store.server import find_database_id, find_filled_defaults, find_hash_readers

    try:
        others = verify_schema(connection)
    except DispatcherError as error:
        yield failed("tables", error)
        return
    words = f"schema {settings.database_schema}, migration {all_migrations()[-1].number:04} (up to date)"
    if others:
        words += f"; there are also dispatcher tables in the schema {', '.join(others)}: no process sends their emails"
    remedy = "Drop those tables when you no longer need them."
    yield passed_if(not others, "tables", words, remedy, CheckState.WARNING)
    unbuilt = sorted(lasting_indexes(each.text for each in all_migrations()).keys() - find_valid_indexes(connection))
    words = f"these do not exist, or are invalid: {', '.join(unbuilt)}" if unbuilt else "every index exists"
    yield passed_if(not unbuilt, "indexes", words, "Run `dispatcher init`, which builds them.", CheckState.WARNING)
    filled = find_filled_defaults.sync(connection)
    words = f"there are rows in {', '.join(filled)}" if filled else "the default partitions are empty"
    remedy = "Run `dispatcher init`, which moves this week's rows to this week's partition."
    yield passed_if(not filled, "partitions", words, remedy, CheckState.WARNING)
    readers = find_hash_readers.sync(connection)
    words = f"{', '.join(readers) or 'no application'} can read the hashes of payloads, from which codes can be guessed"
    remedy = (
        "When every application has the library of this release, execute the output of "
        "`dispatcher topology grants --exact`."
    )
    yield passed_if(not readers, "producers' rights", words, remedy, CheckState.WARNING)
    shared = list_shared_host_names.sync(connection)
    words = f"several connected hosts are named {', '.join(shared)}" if shared else "each connected host has its own"
    remedy = (
        "Set DISPATCHER_HOST_NAME to a different name on each of these hosts. If a host has just lost its network or "
        "power, check again after some minutes."
    )
    yield passed_if(not shared, "host names", words, remedy, CheckState.WARNING)
    yield from _check_ledgers(settings, find_database_id.sync(connection))
    yield from _check_pending(settings, connection)
    yield from _check_breakers(connection)


def _check_ledgers(settings: Settings, database_id: UUID) -> Iterator[Finding]:
    """Warns of each in-flight ledger whose emails the relay cannot settle."""
    subject = "in-flight ledgers"
    faults = 0
    for path in sorted(settings.run_dir.glob(f"*{SUFFIX}")):
        remedy = (
            "Resolve the emails of the worker that wrote the ledger (`dispatcher held list`), then move the ledger to "
            "a different folder."
        )
        try:
            found = living_ledger(path)
            if found is None or found.database_id in (None, database_id):
                continue
            words = (
                f"{path.name} belongs to another database ({found.database_id}): the relay does not settle its emails"
            )
            remedy = (
                "Start `dispatcher run` once with the DISPATCHER_DATABASE_URL of that database. If that database no "
                "longer exists, move the file to a different folder."
            )
        except DispatcherError as error:
            words = f"{path.name} is not settled: {error.message}"
        faults += 1
        yield Finding(subject, CheckState.WARNING, words, remedy)
    if not faults:
        yield passed(subject, "this host's relay settles all ledgers in the run directory")


def _check_pending(settings: Settings, connection: Session) -> Iterator[Finding]:
    """Reports pending emails that will fail: no provider can send them, or a header or a number is not allowed."""
    from dispatcher.domain.headers import headers_fault
    from dispatcher.providers.capabilities import capabilities_of, capability_gap
    from dispatcher.store.emails import SAMPLE, sample_pending

    configured = capabilities_of(settings.providers)
    sample = sample_pending(connection)
    without_provider = [
        why.message for email in sample if (why := capability_gap(email, configured, settings.account_rules))
    ]
    with_header = [
        fault for email in sample if (fault := headers_fault(email.headers, settings.allowed_provider_headers))
    ]
    faults = [settings.sms_rules.fault(next(iter(sms.to), ""), "") for sms in sample if sms.channel == "sms"]
    with_number = [f"its recipient {fault.reason}" for fault in faults if fault]
    for reasons, remedy in (
        (with_number, "Before `dispatcher run`, correct DISPATCHER_SMS_COUNTRIES, or cancel these SMS."),
        (
            without_provider,
            "Before `dispatcher run`, add a provider that can send these emails to DISPATCHER_PROVIDERS.",
        ),
        (with_header, "Before `dispatcher run`, add these emails' headers to DISPATCHER_ALLOWED_PROVIDER_HEADERS."),
    ):
        if reasons:
            words = f"{len(reasons):,} of the oldest {SAMPLE:,} pending emails will fail; the first: {reasons[0]}"
            yield Finding("pending emails", CheckState.FAILED, words, remedy)


def _check_breakers(connection: Session) -> Iterator[Finding]:
    """Names each provider that workers cannot use now. `check_providers` may find that it accepts our credentials."""
    from dispatcher.domain.waiting import describe_problem
    from dispatcher.store.providers import find_troubles

    for each in find_troubles.sync(connection):
        state = f"{each.provider}: {each.state.replace('_', ' ')} in {counted(each.workers, 'worker')}"
        yield Finding("circuit breaker", CheckState.WARNING, f"{state}; {describe_problem(each)}")


def check_rabbitmq(settings: Settings) -> Iterator[Finding]:
    """Checks RabbitMQ: the server, the exchange, the queues, and the management API if its URL is set."""
    from dispatcher.broker.topology import Topology, verify

    topology = Topology.of(settings)
    try:
        asyncio.run(verify(settings.amqp_url, topology, ca_file=settings.ca_file))
        dlq, *send_queues = topology.queues
        queues = f"queues {', '.join(send_queues)} and {dlq}"
        yield passed("RabbitMQ", f"reachable; exchange {topology.exchange}, {queues} exist with the right arguments")
    except ServerUnavailable as error:
        yield failed("RabbitMQ", error, _START.format(variable="DISPATCHER_AMQP_URL"))
    except DispatcherError as error:
        yield failed("RabbitMQ", error)
    if settings.rabbitmq_management_url:
        yield from _check_management(settings, topology)
    else:
        words = (
            "bindings, policies and alarms are not checked, because AMQP cannot read them; and the monitor does not "
            "count the unacked messages of the DLQ"
        )
        remedy = "Set DISPATCHER_RABBITMQ_MANAGEMENT_URL. `dispatcher topology users` prints a read-only user for it."
        yield Finding("RabbitMQ topology", CheckState.WARNING, words, remedy)


def _check_management(settings: Settings, topology: Topology) -> Iterator[Finding]:
    from dispatcher.broker.connection import vhost_of
    from dispatcher.broker.inspection import find_faults, find_offline_members
    from dispatcher.broker.management import Management

    subject = "RabbitMQ topology"
    try:
        vhost = vhost_of(settings.amqp_url)
        management = Management(settings.rabbitmq_management_url, vhost=vhost, ca_file=settings.ca_file)
        yield passed("RabbitMQ management", f"RabbitMQ {asyncio.run(management.version())}")
        faults = asyncio.run(find_faults(management, topology))
        for fault in faults:
            yield failed(subject, fault)
        if not faults:
            words = "bindings exist; queue arguments and policies are safe (as reported by the management API)"
            yield passed(subject, words)
        for node, short_of in asyncio.run(management.alarms()):
            words = (
                f"the node {node} has an alarm: it is short of {short_of}. RabbitMQ accepts no messages until it ends"
            )
            remedy = (
                f"Free {short_of} on that node, or change RabbitMQ's limit. See rabbitmq-diagnostics alarms. Emails "
                "wait in PostgreSQL meanwhile, and none is lost."
            )
            yield Finding("RabbitMQ alarms", CheckState.FAILED, words, remedy)
        for offline in asyncio.run(find_offline_members(management, topology)):
            nodes, state = ", ".join(offline.nodes), CheckState.FAILED
            words = f"the queue {offline.queue} has lost its quorum and accepts no messages; offline: {nodes}"
            remedy = "Start those nodes again. See rabbitmq-queues quorum_status."
            if offline.has_majority:
                state, words = CheckState.WARNING, f"the queue {offline.queue} has members that are offline: {nodes}"
                remedy = "Start those nodes again before another node stops."
            yield Finding("RabbitMQ quorum", state, words, remedy)
        yield _check_consumer_timeout(settings, management)
    except DispatcherError as error:
        remedy = "Enable RabbitMQ's management plugin, or correct DISPATCHER_RABBITMQ_MANAGEMENT_URL."
        yield failed("RabbitMQ management", error, remedy)


def _check_consumer_timeout(settings: Settings, management: Management) -> Finding:
    """Warns if RabbitMQ might close a worker's channel because the worker keeps a message unacked for too long."""
    from dispatcher.broker.inspection import CONSUMER_TIMEOUT_SECONDS, consumer_timeout_in
    from dispatcher.broker.topology import Topology

    reports = [asyncio.run(management.queue(queue)) for queue in Topology.of(settings).send_queues.values()]
    found = min((timeout for each in reports if (timeout := consumer_timeout_in(each or {})) is not None), default=None)
    seconds = CONSUMER_TIMEOUT_SECONDS if found is None else found
    # A message stays unacked while its worker waits for a send slot, for the provider's answers, for the retries and,
    # if PostgreSQL is unreachable, for the commit of the result.
    tries = settings.max_attempts
    held = (
        (tries + 1) * settings.send_timeout_seconds
        + sum(min(settings.retry_cap_seconds, settings.retry_base_seconds * 2.0**retry) for retry in range(tries - 1))
        + settings.lease_seconds
        + settings.drain_seconds
    )
    source = "RabbitMQ's default; rabbitmq.conf may change it" if found is None else "set on the queue"
    words = f"{seconds:g} s ({source}); a worker may keep a message unacked for {held:g} s"
    remedy = (
        "Raise consumer_timeout, or lower DISPATCHER_MAX_ATTEMPTS, DISPATCHER_RETRY_CAP_SECONDS, "
        "DISPATCHER_SEND_TIMEOUT_SECONDS, DISPATCHER_LEASE_SECONDS or DISPATCHER_DRAIN_SECONDS. Otherwise RabbitMQ "
        "closes the worker's channel and redelivers the worker's messages."
    )
    return passed_if(held < seconds, "RabbitMQ consumer timeout", words, remedy, CheckState.WARNING)


def check_capabilities(settings: Settings) -> Iterator[Finding]:
    """Reports which kinds of emails no configured provider can send, and to which countries SMS may be sent."""
    from dispatcher.providers.capabilities import capabilities_of, unsupported_by_all

    if settings.providers:
        limits = unsupported_by_all(capabilities_of(settings.providers))
        words = (
            f"no configured provider can send emails with {' or '.join(limits)}"
            if limits
            else "the configured providers can send every kind of email"
        )
        yield passed("capabilities", words)
    if settings.sms_providers:
        countries = ", ".join(sorted(settings.sms_countries or ["not limited by this host"]))
        yield passed("countries of SMS", f"{countries} (DISPATCHER_SMS_COUNTRIES; default: the senders' countries)")


def check_event_sources(settings: Settings) -> Iterator[Finding]:
    """Lists the ways in which providers' events reach the dispatcher, and checks access to the Maildir of bounces."""
    sources = []
    for provider, who, what in (
        ("sendgrid", "SendGrid", "key"),
        ("ses", "SNS", "topic"),
        ("resend", "Resend", "secret"),
    ):
        for name, found in settings.verifies_events(provider).items():
            of_account = "" if name == provider else f" of {name}"
            sources.append(f"{who} posts to /v1/events/{provider} ({counted(len(found), what)}{of_account})")
    if settings.ses_events_queue_url:
        sources.append("the monitor polls DISPATCHER_SES_EVENTS_QUEUE_URL")
    if settings.bounce_maildir:
        sources.append("the monitor reads DISPATCHER_BOUNCE_MAILDIR")
        new = settings.bounce_maildir / "new"
        may = os.access(new, os.R_OK | os.W_OK | os.X_OK)
        words = f"this user {'may' if may else 'may not'} read and change {new}"
        remedy = "Make this user the owner of the Maildir; docs/events-setup-smtp.md shows how."
        if not may and not new.exists():
            words = f"{new} does not exist, or this user may not see it"
            remedy = f"Set DISPATCHER_BOUNCE_MAILDIR to the mail server's Maildir, or run: mkdir -p {new}. {remedy}"
        yield passed_if(may, "Maildir of bounces", words, remedy)
    words = "; ".join(sources) or (
        "none: bounces and complaints are not reported, and held emails need an operator (docs/events-setup.md)"
    )
    yield passed("event sources", words)


def check_packages() -> Iterator[Finding]:
    """Checks that each provider from an installed package can be loaded, and has no built-in provider's name."""
    from dispatcher.config.plugins import clash, installed, packages_of, provider_class

    for name in installed():
        subject = f"package {packages_of(name)}"
        try:
            provider_class(name)
            fault = clash(name)
        except ValueError as error:
            fault = f"DISPATCHER_PROVIDERS {error}"
        if fault:
            words = f"if DISPATCHER_PROVIDERS includes {name}, `dispatcher run` fails: {fault}"
            yield Finding(subject, CheckState.WARNING, words)
        else:
            yield passed(subject, f"adds the provider {name}")


def check_providers(settings: Settings) -> Iterator[Finding]:
    """Checks whether each provider would accept emails. Sends nothing."""
    from dispatcher.config.plugins import renamed
    from dispatcher.providers.registry import check_provider

    for name in settings.providers:
        for words in settings.own[name].doubts():
            yield Finding(f"provider {name}", CheckState.WARNING, renamed(words, name))
        try:
            yield passed(f"provider {name}", asyncio.run(check_provider(name, settings)))
        except DispatcherError as error:
            yield failed(f"provider {name}", error)
