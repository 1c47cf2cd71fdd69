"""The metrics of all processes, each declared once. A provider declares its own metrics in its own module.

`./run generate` writes the table in docs/metrics.md and the panels of the dashboard from these declarations.

Names end in their unit or in `_total`. Label values come from closed vocabularies: never an id, an address or a host.
`monitor.server_gauges` declares the metrics that the monitor computes from the database and the servers.
"""

from __future__ import annotations

from typing import Final

from dispatcher.telemetry.meters import Counter, Gauge, Histogram, Panel

_STATEMENT_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SEND_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_END_TO_END_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400)
_BATCH_EMAILS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# Metrics of single emails.
EMAILS: Final = Counter(
    "dispatcher_emails_total",
    "Emails that became sent, failed or held after an attempt, by the outcome of this attempt.",
    ("provider", "outcome"),
    panel=Panel.SENDING,
)
ATTEMPTS: Final = Counter(
    "dispatcher_attempts_total",
    "Recorded attempts, by workers and by recovery. error_type is none if the provider accepted the email.",
    ("provider", "outcome", "error_type"),
    panel=Panel.SENDING,
)
RETRIES: Final = Counter(
    "dispatcher_retries_total",
    "Attempts after which the worker makes another attempt within the same lease.",
    ("provider",),
    panel=Panel.SENDING,
)
REDELIVERIES: Final = Counter(
    "dispatcher_redeliveries_total",
    "Deferred emails that used up their attempts, and began to wait for a redelivery.",
    ("provider",),
    panel=Panel.SENDING,
)
SEND_SECONDS: Final = Histogram(
    "dispatcher_send_seconds",
    "Duration of an attempt.",
    _SEND_SECONDS,
    ("provider",),
    panel=Panel.SENDING,
)
END_TO_END_SECONDS: Final = Histogram(
    "dispatcher_end_to_end_seconds",
    "Time from the enqueue to the provider's acceptance; for a scheduled email, from its send_at.",
    _END_TO_END_SECONDS,
    panel=Panel.SENDING,
)
HELD: Final = Counter(
    "dispatcher_held_emails_total",
    "Emails that became held because their outcome is unknown. reason is promotion if PostgreSQL lost commits when a "
    "standby was promoted.",
    ("reason",),
    (("no_answer",), ("worker_died",), ("worker_frozen",), ("lease_expired",), ("promotion",)),
    panel=Panel.TROUBLE,
)
CANCELLED: Final = Counter(
    "dispatcher_cancelled_emails_total",
    "Emails that operators or applications cancelled, counted about a minute later by one of the monitors, and emails "
    "that expired before they were sent, or while they were held.",
    ("reason",),
    (("cancelled",), ("expired",)),
    panel=Panel.SENDING,
)
DOMAIN_WAITS: Final = Counter(
    "dispatcher_domain_waits_total",
    "How often a worker made an email wait because a ceiling of a recipient domain was reached.",
    panel=Panel.SENDING,
)
SUPPRESSED_RECIPIENTS: Final = Counter(
    "dispatcher_suppressed_recipients_total",
    "Recipients to whom a worker did not send, because they are suppressed, or because DISPATCHER_ALLOW_RECIPIENTS "
    "does not allow them (kept_back).",
    ("reason",),
    (("hard_bounce",), ("soft_bounce",), ("complaint",), ("unsubscribe",), ("manual",), ("kept_back",)),
    panel=Panel.TROUBLE,
)
LEASES_LOST: Final = Counter(
    "dispatcher_lost_leases_total",
    "Results of attempts that did not change the email, because the worker had lost the email's lease.",
    panel=Panel.TROUBLE,
)
RECOVERED: Final = Counter(
    "dispatcher_recovered_emails_total",
    "Emails that recovery made due again or held, because their worker, host or message was lost, or because "
    "PostgreSQL lost commits.",
    ("reason",),
    (
        *(("worker_died",), ("worker_frozen",), ("lease_expired",), ("message_lost",), ("host_returned",)),
        ("promotion",),
    ),
    panel=Panel.TROUBLE,
)

STATEMENTS_REFUSED: Final = Counter(
    "dispatcher_refused_statements_total",
    "How often PostgreSQL refused a statement because of one email (email), or a round of a periodic service failed "
    "because PostgreSQL refused a statement (service). The usual reason is a damaged row.",
    ("kind",),
    (("email",), ("service",)),
    panel=Panel.TROUBLE,
)

# Metrics of messages and batches.
DUPLICATES: Final = Counter(
    "dispatcher_duplicate_deliveries_total",
    "Messages that workers acknowledged without sending the email, because the email was finished, not due, or leased "
    "by another worker.",
    ("status",),
    panel=Panel.TROUBLE,
)
MESSAGES_REJECTED: Final = Counter(
    "dispatcher_rejected_messages_total",
    "Messages that workers rejected, because they point to no email, or to an email that PostgreSQL cannot lease. "
    "RabbitMQ moves these messages to the DLQ.",
    panel=Panel.TROUBLE,
)
LEASE_SECONDS: Final = Histogram(
    "dispatcher_lease_seconds",
    "Duration of the SQL statement that leases emails.",
    _STATEMENT_SECONDS,
    panel=Panel.DATABASE,
)
LEASE_EMAILS: Final = Histogram(
    "dispatcher_lease_batch_emails", "Emails per SQL statement that leases emails.", _BATCH_EMAILS, panel=Panel.DATABASE
)
RECORD_SECONDS: Final = Histogram(
    "dispatcher_record_seconds",
    "Duration of the SQL statement that records results.",
    _STATEMENT_SECONDS,
    panel=Panel.DATABASE,
)
RECORD_EMAILS: Final = Histogram(
    "dispatcher_record_batch_emails",
    "Results per SQL statement that records results.",
    _BATCH_EMAILS,
    panel=Panel.DATABASE,
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
    "Emails whose message RabbitMQ did not confirm or could not route.",
    ("queue",),
    (("send",), ("dlq",)),
    panel=Panel.DATABASE,
)

# Metrics of providers.
THROTTLES: Final = Counter(
    "dispatcher_throttles_total",
    "Responses with which a provider throttled a worker.",
    ("provider",),
    panel=Panel.SENDING,
)
BULK_CALLS: Final = Counter(
    "dispatcher_bulk_calls_total",
    "Bulk calls: calls that send several emails to a provider.",
    ("provider",),
    panel=Panel.API,
)
BULK_CALL_EMAILS: Final = Counter(
    "dispatcher_bulk_call_emails_total", "Emails in bulk calls.", ("provider",), panel=Panel.API
)
BREAKERS: Final = Gauge(
    "dispatcher_breaker_workers",
    "Workers of this host, by provider and by the state of the worker's circuit breaker for this provider.",
    ("provider", "state"),
    panel=Panel.HOSTS,
)

# Metrics of the events that providers report after they have accepted an email.
EVENTS: Final = Counter(
    "dispatcher_provider_events_total",
    "Events that providers reported. kind: a kind from docs/events.md; a bounce is bounced_hard, bounced_soft or "
    "bounced_blocked. result: new, impossible (no worker can have sent the email through this provider), duplicate or "
    "unknown (no such email). An event that was left out has the kind "
    "unknown, and its result is the reason: refused (by PostgreSQL), foreign (another program's email), ignored, "
    "malformed or unknown_kind. A whole request or message that was left out is forged or stale. mailbox: the company "
    "that runs the recipient's mailbox, derived from the domain: gmail, microsoft, yahoo, apple, other, or unknown "
    "(the event names no recipient).",
    ("provider", "kind", "result", "mailbox"),
    panel=Panel.EVENTS,
)
SETTLED: Final = Counter(
    "dispatcher_settled_emails_total",
    "Emails whose status an event of the provider changed, by the status before and after.",
    ("provider", "previous_status", "status"),
    panel=Panel.EVENTS,
)
DELIVERY_SECONDS: Final = Histogram(
    "dispatcher_delivery_seconds",
    "Time from when PostgreSQL recorded the provider's acceptance until the delivery. The start is by PostgreSQL's "
    "clock, the end by the provider's.",
    _END_TO_END_SECONDS,
    ("provider",),
    panel=Panel.EVENTS,
)

# Metrics of the HTTP API.
API_EMAILS: Final = Counter(
    "dispatcher_api_emails_total",
    "Emails in requests to the HTTP API, and over SMTP: newly accepted, or known from an earlier request with the same "
    "message key.",
    ("outcome",),
    (("accepted",), ("known",)),
    panel=Panel.API,
)
API_REFUSALS: Final = Counter(
    "dispatcher_api_refusals_total",
    "Requests, and emails in batch requests, that the HTTP API refused.",
    ("reason",),
    panel=Panel.API,
)
API_INSERT_SECONDS: Final = Histogram(
    "dispatcher_api_insert_seconds",
    "Duration of the SQL statement with which the HTTP API or the SMTP server inserts emails.",
    _STATEMENT_SECONDS,
    panel=Panel.API,
)
API_INSERT_EMAILS: Final = Histogram(
    "dispatcher_api_insert_batch_emails",
    "Emails per SQL statement with which the HTTP API or the SMTP server inserts emails.",
    _BATCH_EMAILS,
    panel=Panel.API,
)

# Metrics of the SMTP server.
SUBMISSION_CONNECTIONS: Final = Counter(
    "dispatcher_submission_connections_total",
    "Connections to the SMTP server: accepted, or refused because there were too many.",
    ("outcome",),
    (("accepted",), ("refused",)),
    panel=Panel.API,
)
SUBMISSION_REFUSALS: Final = Counter(
    "dispatcher_submission_refusals_total",
    "Logins and messages that the SMTP server refused.",
    ("reason",),
    panel=Panel.API,
)

# Metrics of webhooks.
WEBHOOK_EVENTS: Final = Counter(
    "dispatcher_webhook_events_total",
    "Events posted to webhooks, by the webhook's number and the outcome. If a post fails, the event is posted again.",
    ("webhook", "outcome"),
    panel=Panel.API,
)

# Metrics of processes.
IN_FLIGHT: Final = Gauge(
    "dispatcher_in_flight_emails", "Emails that workers of this host have leased.", panel=Panel.HOSTS
)
CONSUMING: Final = Gauge(
    "dispatcher_consuming_workers", "Workers of this host that consume from RabbitMQ.", panel=Panel.HOSTS
)
RESTARTS: Final = Counter(
    "dispatcher_process_restarts_total",
    "Processes that exited and were restarted or replaced.",
    ("role", "reason"),
    (
        (role, reason)
        for role in ("worker", "relay", "monitor")
        for reason in ("crashed", "could_not_boot", "hung", "stopped", "reloaded", "recycled")
    ),
    panel=Panel.TROUBLE,
)
