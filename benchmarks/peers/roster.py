"""Lists the measured peers: how each peer is started, and what each promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from benchmarks.peers import application
from benchmarks.peers.post_office import leases

Knobs = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Promise:
    """What a peer does when something fails, as text.

    Attributes:
        enqueue: Whether an email's row and its queue entry are atomic.
        kill: What happens to the emails of a killed worker.
        source: The source of these statements.
    """

    enqueue: str
    kill: str
    source: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer in one configuration.

    Attributes:
        environment: The folder with the peer's code and requirements.
        module: The module that has `enqueue`.
        programs: The worker commands, after `python -m`; `{module}` is the module, other braces are knobs.
        emails: The number of emails per case, which keeps the peer busy for about six seconds at the machine's full
            speed.
        tables: SQL that creates the application's tables, before `prepare`.
        prepare: Commands that create the peer's own tables.
        knobs: The settings that the sweep found best; passed as environment variables PEER_NAME.
        sweep: The values that `--sweep` tries.
        sent: A query for the number of sent emails in the peer's own tables, and for the time at which the last email
            was recorded.
        dies_whole: Whether the benchmark kills a command together with its children, because the children would
            otherwise continue alone.
    """

    name: str
    environment: str
    module: str
    programs: tuple[str, ...]
    emails: int
    tables: str = application.SCHEMA
    prepare: tuple[str, ...] = ()
    knobs: Knobs = field(default_factory=dict)
    sweep: tuple[Knobs, ...] = ()
    sent: str = "select count(*), extract(epoch from max(sent_at))::float8 from email where status = 'sent'"
    dies_whole: bool = False

    @property
    def is_tuned(self) -> bool:
        """Whether the peer runs with the settings that a sweep found best, not with the settings from the first pages
        of its documentation."""
        return bool(self.knobs)

    def commands(self, knobs: Knobs) -> list[list[str]]:
        """The worker commands, as arguments after the interpreter's path."""
        return [["-m", *program.format(module=self.module, **knobs).split()] for program in self.programs]


_AFTER_COMMIT: Final = "no: the message follows the commit; if the process dies in between, the email is lost"
_AT_LEAST_ONCE: Final = "redelivered, and sent again when its lease expires, even if it was accepted: a duplicate"

PROMISES: Final[Mapping[str, Promise]] = {
    "ours": Promise(
        "yes: one statement, in the application's transaction",
        "emails not on the wire are sent, and answers recorded; emails on the wire are held for an operator, "
        "or sent again if the policy says so",
        "docs/protocol.md",
    ),
    "celery": Promise(
        _AFTER_COMMIT,
        _AT_LEAST_ONCE,
        "Celery, User Guide: Tasks (acks_late); Configuration (task_reject_on_worker_lost: without it, lost)",
    ),
    "dramatiq": Promise(
        _AFTER_COMMIT,
        _AT_LEAST_ONCE,
        "dramatiq, Best Practices: Retriable Actors; Motivation: tasks are only ever acked when they are done",
    ),
    "procrastinate": Promise(
        "yes: the job is inserted by the application's transaction",
        "its jobs stay `doing` until a task that the application provides retries stalled jobs; then like Celery",
        "procrastinate, How-to: Retry stalled jobs; Using an external database connection",
    ),
    "graphile_worker": Promise(
        "yes: the job is inserted by the application's transaction",
        "its jobs, and those that it fetched in advance, stay locked for four hours; then like Celery",
        "graphile-worker, Performance: Batching; sql/000016.sql: locked_at < now() - interval '4 hours'",
    ),
    "post_office": Promise(
        "yes: the queue is a table of the application",
        "no lease: the next run sends the emails of the batch again, up to a whole batch of duplicates",
        "django-post_office, README: send_queued_mail; mail.py: a batch is marked when all of it is done",
    ),
    "post_office-leasing": Promise(
        "yes: the queue is a table of the application",
        "the next run takes the batch again. Recorded emails are not sent again. Emails on the wire, one per thread, "
        "wait until their lease expires and are sent again, even if they were accepted: a duplicate",
        "the application's own lease; django-post_office, README: MAX_RETRIES, RETRY_INTERVAL",
    ),
}
"""The promises by environment; by name for a peer whose promise differs from its environment's."""

_CELERY: Final = (
    "celery -A {{module}} worker --loglevel WARNING --pool {{pool}} --concurrency {{concurrency}} --hostname {name}@%h"
    " --without-gossip --without-mingle --without-heartbeat"
)
_PROCRASTINATE: Final = "procrastinate --app {module}.app worker"
_PROCRASTINATE_TABLES: Final = ("procrastinate --app {module}.app schema --apply",)
_GRAPHILE_WORKER: Final = "benchmarks.peers.graphile_worker.node worker.cjs"
_POST_OFFICE_TABLES: Final = ("django migrate --run-syncdb --verbosity 0",)
_POST_OFFICE_SENT: Final = (
    "select count(*), extract(epoch from max(last_updated))::float8 from post_office_email where status = 0"
)


def _leasing_knobs(processes: int, threads: int, batch: int) -> Knobs:
    return {"processes": processes, "threads": threads, "batch": batch, "tuned": 1, "leasing": 1}


def _graphile_knobs(concurrency: int, connections: int, queue_size: int) -> Knobs:
    """The knobs of each of the two workers: jobs at a time, connections to PostgreSQL, jobs fetched in advance."""
    return {"concurrency": concurrency, "connections": connections, "queue_size": queue_size}


def _celery_knobs(pool: str, concurrency: int, threads: int, prefetch_multiplier: int = 4) -> Knobs:
    """The knobs of each of the two workers. With prefork, `concurrency` is the number of processes, with one thread
    each."""
    return {"pool": pool, "concurrency": concurrency, "threads": threads, "prefetch_multiplier": prefetch_multiplier}


PEERS: Final = (
    Peer(
        "celery-stock",
        "celery",
        "benchmarks.peers.celery.stock",
        ("celery -A {module} worker --loglevel INFO --concurrency 2",),
        emails=1500,
    ),
    Peer(
        "celery-tuned",
        "celery",
        "benchmarks.peers.celery.tuned",
        tuple(_CELERY.format(name=name) for name in ("w1", "w2")),
        emails=6000,
        knobs=_celery_knobs("threads", 4, 4),
        sweep=(
            *(_celery_knobs("threads", threads, threads) for threads in (2, 4, 8, 16)),
            *(_celery_knobs("gevent", greenlets, greenlets) for greenlets in (8, 32)),
            *(_celery_knobs("prefork", processes, 1, 16) for processes in (1, 2, 3)),
            _celery_knobs("prefork", 2, 1, 64),
        ),
    ),
    Peer(
        "dramatiq-stock",
        "dramatiq",
        "benchmarks.peers.dramatiq.stock",
        ("dramatiq {module} --processes 2",),
        emails=2000,
    ),
    Peer(
        "dramatiq-tuned",
        "dramatiq",
        "benchmarks.peers.dramatiq.tuned",
        ("dramatiq {module} --processes {processes} --threads {threads}",),
        emails=6000,
        knobs={"processes": 2, "threads": 4},
        sweep=tuple(
            {"processes": processes, "threads": threads}
            for processes, several in ((2, (2, 4, 8, 16)), (3, (4,)), (4, (2, 4)))
            for threads in several
        ),
    ),
    Peer(
        "procrastinate-stock",
        "procrastinate",
        "benchmarks.peers.procrastinate.stock",
        (_PROCRASTINATE, _PROCRASTINATE),
        emails=1000,
        prepare=_PROCRASTINATE_TABLES,
    ),
    Peer(
        "procrastinate-tuned",
        "procrastinate",
        "benchmarks.peers.procrastinate.tuned",
        (_PROCRASTINATE + " --concurrency {threads} --delete-jobs {delete}",) * 2,
        emails=2500,
        prepare=_PROCRASTINATE_TABLES,
        knobs={"threads": 8, "delete": "successful"},
        sweep=(
            *({"threads": threads, "delete": "successful"} for threads in (4, 8, 16, 32)),
            {"threads": 16, "delete": "never"},
        ),
    ),
    Peer(
        "graphile_worker-tuned",
        "graphile_worker",
        "benchmarks.peers.graphile_worker.shop",
        (_GRAPHILE_WORKER, _GRAPHILE_WORKER),
        emails=12_000,
        prepare=(f"{_GRAPHILE_WORKER} tables",),
        knobs=_graphile_knobs(24, 25, 500),
        sweep=tuple(
            _graphile_knobs(concurrency, connections, queue_size)
            for concurrency, connections, queue_size in (
                (8, 9, 100), (16, 17, 500), (24, 25, 25), (24, 25, 500), (24, 12, 500), (48, 24, 500), (96, 24, 500),
            )
        ),
    ),
    Peer(
        "post_office-stock",
        "post_office",
        "benchmarks.peers.post_office.shop",
        ("django send_queued_mail --processes 2",),
        emails=3500,
        prepare=_POST_OFFICE_TABLES,
        sent=_POST_OFFICE_SENT,
        tables="",
        dies_whole=True,
    ),
    Peer(
        "post_office-tuned",
        "post_office",
        "benchmarks.peers.post_office.shop",
        ("django send_queued_mail --processes {processes}",),
        emails=8000,
        prepare=_POST_OFFICE_TABLES,
        knobs={"processes": 2, "threads": 2, "batch": 1000, "tuned": 1},
        sweep=tuple(
            {"processes": processes, "threads": threads, "batch": batch, "tuned": 1}
            for processes, threads, batch in (
                (2, 1, 1000), (2, 2, 1000), (2, 4, 1000), (2, 2, 4000), (2, 4, 4000), (2, 8, 4000), (3, 2, 1000),
            )
        ),
        sent=_POST_OFFICE_SENT,
        tables="",
        dies_whole=True,
    ),
    Peer(
        "post_office-leasing",
        "post_office",
        "benchmarks.peers.post_office.shop",
        ("benchmarks.peers.post_office.timer {processes}",),
        emails=5000,
        tables=leases.SCHEMA,
        prepare=_POST_OFFICE_TABLES,
        knobs=_leasing_knobs(2, 8, 5000),
        sweep=tuple(
            _leasing_knobs(processes, threads, batch)
            for processes, threads, batch in (
                (2, 2, 1000), (2, 4, 1000), (2, 4, 5000), (2, 8, 5000), (2, 16, 5000), (3, 4, 5000), (3, 8, 5000),
            )
        ),
        sent=leases.SENT,
        dies_whole=True,
    ),
)  # fmt: skip
"""The peers, in the order of the table."""
