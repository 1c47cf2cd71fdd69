"""What `dispatcher doctor` looks at: each check gives findings, and none ends another."""

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
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.errors import ConfigurationError, DispatcherError, ServerUnavailable
from dispatcher.host.ledger_format import SUFFIX, file_octets
from dispatcher.host.ledger_reader import living_ledger
from dispatcher.supervisor.run_dir import run_dir_fault

if TYPE_CHECKING:
    from dispatcher.broker.inspection import Absence
    from dispatcher.broker.management import Management
    from dispatcher.broker.topology import Topology
    from dispatcher.cli.env_file import EnvFile
    from dispatcher.store.connections import Session

OLDEST_POSTGRESQL: Final = 14
OLDEST_PYTHON: Final = (3, 11)
SPARE_CONNECTIONS: Final = 10
"""For relay, monitor, other commands, and what PostgreSQL keeps for its superuser."""
EMPTIED: Final = ("/tmp", "/var/tmp", "/run/user")  # noqa: S108 - named to be warned of
"""Where cleaners delete files that are old, or whose user has logged out."""
SPARE_DESCRIPTORS: Final = 64
"""For logs, pipes, the database and RabbitMQ."""
_START: Final = "Start it, or correct {variable}. `dispatcher dev up` has a private one."

_SYNCHRONOUS: Final = (
    "Set synchronous_standby_names on the primary. The promotion of an asynchronous standby loses commits, and emails "
    "that were sent in them are held."
)


class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not for ever or not as well as it could."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        subject: What was looked at.
        detail: What was found.
        remedy: How to mend it; None where it is well.
    """

    subject: str
    state: CheckState
    detail: str
    remedy: str | None = None


def well(subject: str, words: str) -> Finding:
    """A finding that pleases."""
    return Finding(subject, CheckState.OK, words)


def failed(subject: str, error: DispatcherError, remedy: str | None = None) -> Finding:
    """A fault as a finding; its own remedy goes before the one given."""
    words = " ".join(error.mistakes) if isinstance(error, ConfigurationError) else error.message
    return Finding(subject, CheckState.FAILED, words, error.remedy or remedy)


def judge(subject: str, is_well: bool, words: str, remedy: str, otherwise: CheckState = CheckState.FAILED) -> Finding:
    """A finding by a condition; the remedy stands only where it is needed."""
    return well(subject, words) if is_well else Finding(subject, otherwise, words, remedy)


def check_env_file(file: EnvFile) -> Finding:
    """Warns if every user of this machine may read an env file with secrets."""
    secrets = file.secrets
    is_open = bool(secrets and file.path.stat().st_mode & stat.S_IROTH)
    words = f"every user of this machine may read {file.path}, which holds secrets ({', '.join(secrets)})"
    remedy = f"Run: chmod o= {file.path}. The user of `dispatcher run` must be able to read it."
    return Finding("env file", CheckState.WARNING, words, remedy) if is_open else well("env file", f"{file.path}")


def check_process(settings: Settings) -> Iterator[Finding]:
    """Python, and what the system allows a process."""
    from dispatcher.providers.registry import most_connections

    oldest = ".".join(map(str, OLDEST_PYTHON))
    is_new = sys.version_info >= OLDEST_PYTHON
    yield judge("Python", is_new, platform.python_version(), f"Install Python {oldest} or newer.")
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # `run` and `api` raise their own to the hard limit
    needed = sum(most_connections(name, settings) for name in settings.providers) + SPARE_DESCRIPTORS
    is_enough = limit == resource.RLIM_INFINITY or limit >= needed
    words = f"at most {limit} per process, a worker may need {needed}"
    remedy = f"Raise the hard limit to {2 * needed}: LimitNOFILE in a unit, minfds in supervisord.conf, or ulimit -Hn."
    yield judge("file descriptors", is_enough, words, remedy, CheckState.WARNING)


def check_run_dir(settings: Settings) -> Iterator[Finding]:
    """Whether `run` can use the run directory: no other user may write there, and the disk has room for the ledgers."""
    subject = "run directory"
    needed = settings.workers * file_octets(2 * settings.prefetch)
    try:
        settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if fault := run_dir_fault(settings.run_dir):
            yield Finding(subject, CheckState.FAILED, f"{settings.run_dir} {fault.words}", fault.remedy)
            return
        with tempfile.TemporaryFile(dir=settings.run_dir) as file:
            os.posix_fallocate(file.fileno(), 0, needed)
        doubt = volatility(settings.run_dir.resolve(), _mounts())
        remedy = "Set DISPATCHER_RUN_DIR to a folder on a disk of this host, such as /var/lib/email-dispatcher."
        words = f"{settings.run_dir} is writable{', but ' + doubt if doubt else ''}"
        yield judge(subject, not doubt, words, remedy, CheckState.WARNING)
    except OSError as error:
        words = f"{settings.run_dir}: {error.strerror}"
        remedy = "Set DISPATCHER_RUN_DIR to a folder that this user may write."
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            words += f"; the ledgers of {settings.workers} workers need {needed / 2**20:.1f} MiB"
            remedy = "Make room on that disk, or set DISPATCHER_RUN_DIR to a folder on another disk of this host."
        yield Finding(subject, CheckState.FAILED, words, remedy)


def volatility(folder: Path, mounts: str) -> str | None:
    """Why the ledgers in a folder may vanish while their workers run, or before they are settled; None if they stay.

    Args:
        folder: Without symbolic links.
        mounts: The text of /proc/mounts.
    """
    for place in EMPTIED:
        if folder.is_relative_to(place):
            return f"cleaners empty {place}"
    # Device, folder, type, and what does not matter here. The innermost folder counts; of several there, the last.
    entries = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    around = [(len(place), kind) for place, kind in entries if folder.is_relative_to(place)]
    _, kind = max(reversed(around), key=lambda each: each[0], default=(0, ""))
    return (
        f"it is kept in memory ({kind}): the host's next start finds it empty" if kind in ("tmpfs", "ramfs") else None
    )


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_postgresql(settings: Settings) -> Iterator[Finding]:
    """The server, its durability, its room for our connections, our tables, and whether it commits."""
    from dispatcher.store.connections import connected
    from dispatcher.store.server import describe_server

    try:
        with connected(settings.database_url, name="dispatcher doctor") as connection:
            server = describe_server(connection)
            words = f"{server.version} answers, {OLDEST_POSTGRESQL} is the oldest that will do"
            is_new = server.version_number >= OLDEST_POSTGRESQL * 10_000
            yield judge("PostgreSQL", is_new, words, f"Upgrade it to {OLDEST_POSTGRESQL} or newer.")
            words = f"fsync is {server.fsync}, synchronous_commit is {server.synchronous_commit}"
            is_durable = server.fsync == "on" and server.synchronous_commit != "off"
            yield judge("PostgreSQL durability", is_durable, words, "Switch both on: a crash would lose emails.")
            if server.standby_count:
                awaited = "one" if server.has_synchronous_standby else "none"
                words = f"{server.standby_count} connected, and commits wait for {awaited}"
                yield judge(
                    "PostgreSQL standbys", server.has_synchronous_standby, words, _SYNCHRONOUS, CheckState.WARNING
                )
            yield _room(settings, server.max_connections)
            yield from _check_tables(settings, connection)
        yield from _check_sessions(settings)
    except DispatcherError as error:
        yield failed("PostgreSQL", error, _START.format(variable="DISPATCHER_DATABASE_URL"))


def _check_sessions(settings: Settings) -> Iterator[Finding]:
    from dispatcher.store.server import time_commit, verify_sessions

    try:
        asyncio.run(verify_sessions(settings.database_url, name="dispatcher doctor"))
        yield well("PostgreSQL sessions", "a connection keeps its session, as locks and notifications need")
    except ConfigurationError as error:
        yield failed("PostgreSQL sessions", error)
        return  # the write would change the settings of others' sessions
    try:
        seconds = asyncio.run(time_commit(settings.database_url, name="dispatcher doctor"))
        yield well("PostgreSQL commits", f"connected and committed a small write in {seconds:.2f} s")
    except DispatcherError as error:
        yield failed("PostgreSQL commits", error)


def _room(settings: Settings, max_connections: int) -> Finding:
    from dispatcher.worker.process import POOL_SIZE

    needed = settings.workers * POOL_SIZE + SPARE_CONNECTIONS
    words = f"{max_connections} for everybody, this host's {settings.workers} workers need {needed}"
    remedy = "Raise max_connections, or lower DISPATCHER_WORKERS."
    return judge("PostgreSQL connections", max_connections >= needed, words, remedy)


def _check_tables(settings: Settings, connection: Session) -> Iterator[Finding]:
    from dispatcher.store.migrations import all_migrations, verify_schema
    from dispatcher.store.server import find_filled_defaults

    try:
        others = verify_schema(connection)
    except DispatcherError as error:
        yield failed("tables", error)
        return
    words = f"in the schema {settings.database_schema}, at this release, migration {all_migrations()[-1].number:04}"
    if others:
        words += f"; the schema {', '.join(others)} has such tables, too, and no process sends the emails in them"
    yield judge("tables", not others, words, "Drop the other tables once you do not need them.", CheckState.WARNING)
    filled = find_filled_defaults(connection)
    words = f"rows stand in {', '.join(filled)}" if filled else "the default ones are empty"
    yield judge("partitions", not filled, words, "Run `dispatcher init`, which moves this week's.", CheckState.WARNING)
    yield from _check_ledgers(settings, asyncio.run(_database_id(settings)))
    yield from _check_pending(settings, connection)


async def _database_id(settings: Settings) -> UUID:
    from dispatcher.store.connections import connect_unconfigured
    from dispatcher.store.server import find_database_id

    async with await connect_unconfigured(settings.database_url, name="dispatcher doctor") as session:
        return await find_database_id(session)


def _check_ledgers(settings: Settings, database_id: UUID) -> Iterator[Finding]:
    """The in-flight ledgers in the run directory that the relay does not settle."""
    subject = "in-flight ledgers"
    faults = 0
    for path in sorted(settings.run_dir.glob(f"*{SUFFIX}")):
        remedy = "Decide about that worker's emails (`dispatcher held list`), then move the file away."
        try:
            found = living_ledger(path)
            if found is None or found.database_id in (None, database_id):
                continue
            words = f"{path.name} is of another database ({found.database_id}); nothing of it is settled or deleted"
            remedy = "Run once with the DISPATCHER_DATABASE_URL of that database; if it is gone, move the file away."
        except DispatcherError as error:
            words = f"{path.name} is not settled: {error.message}"
        faults += 1
        yield Finding(subject, CheckState.WARNING, words, remedy)
    if not faults:
        yield well(subject, "the relay of this host settles all that there are")


def _check_pending(settings: Settings, connection: Session) -> Iterator[Finding]:
    """Finds pending emails that `run` would fail: no configured provider can carry them, or a header is not allowed."""
    from dispatcher.domain.header_names import headers_fault
    from dispatcher.providers.capabilities import capabilities_of, uncarried
    from dispatcher.store.emails import SAMPLE, sample_pending

    configured = capabilities_of(settings.providers)
    sample = sample_pending(connection)
    lacks = [why.message for email in sample if (why := uncarried(email, configured))]
    commands = [fault for email in sample if (fault := headers_fault(email.headers, settings.allowed_provider_headers))]
    for reasons, variable in ((lacks, "DISPATCHER_PROVIDERS"), (commands, "DISPATCHER_ALLOWED_PROVIDER_HEADERS")):
        if reasons:
            words = f"of the oldest {SAMPLE:,} pending emails, {len(reasons):,} will fail; the first: {reasons[0]}"
            remedy = f"Add what they need to {variable} before `dispatcher run`."
            yield Finding("pending emails", CheckState.FAILED, words, remedy)


def check_rabbitmq(settings: Settings) -> Iterator[Finding]:
    """The server, our exchange and queues, and its management API if we were told one."""
    from dispatcher.broker.topology import Topology, verify

    topology = Topology.of(settings)
    try:
        asyncio.run(verify(settings.amqp_url, topology, ca_file=settings.ca_file))
        words = f"answers; exchange {topology.exchange}, queues {topology.queue} and {topology.dlq} are as we need them"
        yield well("RabbitMQ", words)
    except ServerUnavailable as error:
        yield failed("RabbitMQ", error, _START.format(variable="DISPATCHER_AMQP_URL"))
    except DispatcherError as error:
        yield failed("RabbitMQ", error)
    if settings.rabbitmq_management_url:
        yield from _check_management(settings, topology)
    else:
        words = "not verified: bindings and policies cannot be asked for by AMQP, and the DLQ is probed less well"
        remedy = "Set DISPATCHER_RABBITMQ_MANAGEMENT_URL; `dispatcher topology users` has a user that only looks."
        yield Finding("RabbitMQ topology", CheckState.WARNING, words, remedy)


def _check_management(settings: Settings, topology: Topology) -> Iterator[Finding]:
    from dispatcher.broker.connection import vhost_of
    from dispatcher.broker.inspection import find_absent_members, find_faults
    from dispatcher.broker.management import Management

    subject = "RabbitMQ topology"
    try:
        vhost = vhost_of(settings.amqp_url)
        management = Management(settings.rabbitmq_management_url, vhost=vhost, ca_file=settings.ca_file)
        yield well("RabbitMQ management", f"RabbitMQ {management.version()}")
        faults = find_faults(management, topology)
        for fault in faults:
            yield failed(subject, fault)
        if not faults:
            yield well(subject, "as reported: bindings are there, and neither arguments nor policies lose messages")
        yield from map(_absence, find_absent_members(management, topology))
        yield _consumer_timeout(settings, management)
    except DispatcherError as error:
        remedy = "Enable its management plugin, or correct DISPATCHER_RABBITMQ_MANAGEMENT_URL."
        yield failed("RabbitMQ management", error, remedy)


def _absence(absence: Absence) -> Finding:
    nodes = ", ".join(absence.absent)
    if absence.is_lost:
        words = f"the queue {absence.queue} has lost its quorum and takes no messages: {nodes} not online"
        remedy = "Start those nodes again. See rabbitmq-queues quorum_status."
        return Finding("RabbitMQ quorum", CheckState.FAILED, words, remedy)
    words = f"the queue {absence.queue} has members that are not online: {nodes}"
    return Finding("RabbitMQ quorum", CheckState.WARNING, words, "Start those nodes again before another one stops.")


def _consumer_timeout(settings: Settings, management: Management) -> Finding:
    """Whether a worker has acked a delivery before RabbitMQ takes its channel away for holding it."""
    from dispatcher.broker.inspection import CONSUMER_TIMEOUT_SECONDS, consumer_timeout_in

    found = consumer_timeout_in(management.queue(settings.queue) or {})
    seconds = CONSUMER_TIMEOUT_SECONDS if found is None else found
    # It waits for room, and for its attempt; while PostgreSQL is away for its record, which a drain waits for.
    held = 2 * settings.send_timeout_seconds + settings.lease_seconds + settings.drain_seconds
    source = "RabbitMQ's default, unless rabbitmq.conf says otherwise" if found is None else "the queue's"
    words = f"{seconds:g} s ({source}); a worker may hold a delivery for {held:g} s"
    remedy = (
        "RabbitMQ would close the worker's channel and deliver its window again: raise consumer_timeout, or lower "
        "DISPATCHER_SEND_TIMEOUT_SECONDS, DISPATCHER_LEASE_SECONDS or DISPATCHER_DRAIN_SECONDS."
    )
    return judge("RabbitMQ consumer timeout", held < seconds, words, remedy, CheckState.WARNING)


def check_capabilities(settings: Settings) -> Iterator[Finding]:
    """Which emails no configured provider can carry."""
    from dispatcher.providers.capabilities import capabilities_of, limits_of

    if settings.providers:
        limits = limits_of(capabilities_of(settings.providers))
        words = f"no provider for emails with {' or '.join(limits)}" if limits else "a provider for every kind of email"
        yield well("capabilities", words)


def check_packages() -> Iterator[Finding]:
    """Which packages bring providers, and whether they fit."""
    from dispatcher.config.plugins import clash, installed, packages_of, provider_class

    for name in installed():
        subject = f"package {packages_of(name)}"
        try:
            provider_class(name)
        except ValueError as error:
            yield Finding(subject, CheckState.WARNING, f"DISPATCHER_PROVIDERS, if it {error}")
        else:
            words = clash(name)
            yield Finding(subject, CheckState.WARNING, words) if words else well(subject, f"brings the provider {name}")


def check_providers(settings: Settings) -> Iterator[Finding]:
    """Whether each provider would take emails; sends nothing."""
    from dispatcher.providers.registry import check_provider

    for name in settings.providers:
        try:
            yield well(f"provider {name}", asyncio.run(check_provider(name, settings)))
        except DispatcherError as error:
            yield failed(f"provider {name}", error)
