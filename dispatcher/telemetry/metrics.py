"""Every metric that our processes count, declared once, but for those that a provider declares in its own module.

`./run generate` writes what follows from a declaration: the table in docs/metrics.md, and a panel of the dashboard.

Names end in their unit or in `_total`. Labels are words of closed vocabularies: never an id, an address, a host. What
the monitor computes from the database and the servers is declared in `monitor.readings`.
"""

from __future__ import annotations

from typing import Final

from dispatcher.telemetry.meters import Counter, Gauge, Histogram, Panel

_STATEMENT_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SEND_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_END_TO_END_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400)
_BATCH_EMAILS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# One email.
EMAILS: Final = Counter(
    "dispatcher_emails_total",
    "Emails finished by a worker: the outcome that ended them.",
    ("provider", "outcome"),
    panel=Panel.SENDING,
)
ATTEMPTS: Final = Counter(
    "dispatcher_attempts_total",
    "Attempts recorded; error_type is none where the provider accepted.",
    ("provider", "outcome", "error_type"),
    panel=Panel.SENDING,
)
RETRIES: Final = Counter(
    "dispatcher_retries_total", "Attempts that are tried again in process.", ("provider",), panel=Panel.SENDING
)
SEND_SECONDS: Final = Histogram(
    "dispatcher_send_seconds",
    "From an attempt's start to its outcome.",
    _SEND_SECONDS,
    ("provider",),
    panel=Panel.SENDING,
)
END_TO_END_SECONDS: Final = Histogram(
    "dispatcher_end_to_end_seconds",
    "From the enqueue to the provider's acceptance.",
    _END_TO_END_SECONDS,
    panel=Panel.SENDING,
)
HELD: Final = Counter(
    "dispatcher_held_emails_total",
    "Emails held because their outcome is unknown.",
    ("reason",),
    (("no_answer",), ("worker_died",), ("worker_frozen",), ("lease_expired",), ("promotion",)),
    panel=Panel.TROUBLE,
)
LEASES_LOST: Final = Counter(
    "dispatcher_lost_leases_total", "Results that came after their lease was lost.", panel=Panel.TROUBLE
)
RECOVERED: Final = Counter(
    "dispatcher_recovered_emails_total",
    "Emails returned after their owner or their message was gone.",
    ("reason",),
    (
        *(("worker_died",), ("worker_frozen",), ("lease_expired",), ("message_lost",), ("host_returned",)),
        ("promotion",),
    ),
    panel=Panel.TROUBLE,
)

# Messages and batches.
DUPLICATES: Final = Counter(
    "dispatcher_duplicate_deliveries_total",
    "Messages for emails that are finished or another's.",
    ("status",),
    panel=Panel.TROUBLE,
)
MESSAGES_REJECTED: Final = Counter(
    "dispatcher_rejected_messages_total", "Messages that point to no email, sent to the DLQ.", panel=Panel.TROUBLE
)
LEASE_SECONDS: Final = Histogram(
    "dispatcher_lease_seconds", "One lease statement.", _STATEMENT_SECONDS, panel=Panel.DATABASE
)
LEASE_EMAILS: Final = Histogram(
    "dispatcher_lease_batch_emails", "Emails per lease statement.", _BATCH_EMAILS, panel=Panel.DATABASE
)
RECORD_SECONDS: Final = Histogram(
    "dispatcher_record_seconds", "One record statement.", _STATEMENT_SECONDS, panel=Panel.DATABASE
)
RECORD_EMAILS: Final = Histogram(
    "dispatcher_record_batch_emails", "Results per record statement.", _BATCH_EMAILS, panel=Panel.DATABASE
)
PUBLISHED_EMAILS: Final = Counter(
    "dispatcher_published_emails_total",
    "Emails whose message RabbitMQ confirmed.",
    ("queue",),
    (("send",), ("dlq",)),
    panel=Panel.DATABASE,
)
UNROUTABLE_EMAILS: Final = Counter(
    "dispatcher_unroutable_emails_total",
    "Emails whose message RabbitMQ did not take.",
    ("queue",),
    (("send",), ("dlq",)),
    panel=Panel.DATABASE,
)

# Providers.
THROTTLES: Final = Counter(
    "dispatcher_throttles_total", "Answers that asked us to slow down.", ("provider",), panel=Panel.SENDING
)
BULK_CALLS: Final = Counter(
    "dispatcher_bulk_calls_total", "Calls to a provider that carried several emails.", ("provider",), panel=Panel.API
)
BULK_CALL_EMAILS: Final = Counter(
    "dispatcher_bulk_call_emails_total", "Emails that these calls carried.", ("provider",), panel=Panel.API
)
BREAKERS: Final = Gauge(
    "dispatcher_breaker_workers",
    "Workers of this host that see the provider so.",
    ("provider", "state"),
    panel=Panel.HOSTS,
)

# The HTTP API.
API_EMAILS: Final = Counter(
    "dispatcher_api_emails_total",
    "Emails that the HTTP API answered for: accepted, or known because an earlier request brought the same email.",
    ("outcome",),
    (("accepted",), ("known",)),
    panel=Panel.API,
)
API_REFUSALS: Final = Counter(
    "dispatcher_api_refusals_total",
    "Requests, and emails of a batch, that the HTTP API refused.",
    ("reason",),
    panel=Panel.API,
)
API_INSERT_SECONDS: Final = Histogram(
    "dispatcher_api_insert_seconds",
    "One statement that inserts what requests brought.",
    _STATEMENT_SECONDS,
    panel=Panel.API,
)
API_INSERT_EMAILS: Final = Histogram(
    "dispatcher_api_insert_batch_emails", "Emails per such statement.", _BATCH_EMAILS, panel=Panel.API
)

# Processes.
IN_FLIGHT: Final = Gauge("dispatcher_in_flight_emails", "Emails that workers have under lease.", panel=Panel.HOSTS)
CONSUMING: Final = Gauge("dispatcher_consuming_workers", "Workers to which RabbitMQ gives messages.", panel=Panel.HOSTS)
RESTARTS: Final = Counter(
    "dispatcher_process_restarts_total",
    "Processes that ended and were started again or replaced.",
    ("role", "reason"),
    (
        (role, reason)
        for role in ("worker", "relay", "monitor")
        for reason in ("crashed", "could_not_boot", "hung", "stopped", "reloaded", "recycled")
    ),
    panel=Panel.TROUBLE,
)
