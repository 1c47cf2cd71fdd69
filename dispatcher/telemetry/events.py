"""Every log event, declared once: its name (`noun.verb_past`), when it is logged, and its fields.

A test asserts that the code logs every declared event and no undeclared one. No field holds an address, a subject, a
body or a secret.

A process logs each event at most 100 times in 10 seconds. `storms.UNLIMITED` lists the exceptions. The first line after
such a window has the field `suppressed`: the number of lines that were left out. When the log's reader was stuck, the
next line that is written has the field `lines_dropped`: the number of lines that were lost before it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

EVENTS: Final = MappingProxyType(
    {
        # one email
        "email.attempted": "An attempt ended: email_id, attempt, provider, outcome, status, error_type, "
        "provider_code, duration_ms, correlation_id, trace_id.",
        "email.lease_lost": "A worker has a result for an email whose lease it lost. The result changes nothing, "
        "except that it is evidence for an email that recovery holds: email_id, attempt, outcome.",
        "email.locked": "Another transaction holds locks on the rows of emails. These emails wait; the others are "
        "sent: count, email_ids (the first few), lock_holders (sessions that may hold the locks: pid, application, "
        "state, age).",
        "email.statement_failed": "PostgreSQL cannot read or write one email. The others are sent: email_id, reason.",
        "email.hold_reverted": "An email that recovery held is pending again: its worker or ledger is back, and proves "
        "that nothing of the email was sent: email_id, correlation_id.",
        "email.recovered": "Recovery took an email from an owner that died or vanished, or an email became uncertain "
        "because PostgreSQL lost commits: reason (lease_expired, worker_crashed, promotion), status.",
        "message.duplicated": "A worker acknowledged a message whose email is finished or leased by another worker: "
        "status.",
        "message.returned": "An operator moved a dead letter back to the send queue: verdict (replayed, refused, "
        "stale).",
        "message.rejected": "A worker rejected a message that points to no email; RabbitMQ moved it to the DLQ: "
        "reason.",
        # servers
        "broker.connected": "The process is connected to RabbitMQ and consumes.",
        "broker.connection_lost": "RabbitMQ is unreachable. The process reconnects with growing waits: reason, "
        "retry_in_seconds.",
        "store.connection_lost": "PostgreSQL is unreachable. The process keeps its results and retries: reason, "
        "retry_in_seconds.",
        "store.connected": "PostgreSQL is reachable again.",
        "store.commits_waiting": "Commits wait for a synchronous standby and keep the rows of emails locked: count, "
        "email_ids (the first few), lock_holders (the sessions that wait).",
        "store.promoted": "PostgreSQL runs on a new timeline: a standby was promoted, or a backup was restored. If "
        "that lost commits (lossy), earlier leases and messages are uncertain: timeline, previous_timeline, lossy, "
        "leases, messages.",
        "provider.paused": "The provider cannot be used for any email; its emails wait: provider, state, reason, "
        "seconds.",
        "provider.resumed": "The provider can be used again: provider.",
        "provider.throttled": "The provider throttled a worker. The rate of all workers is halved: provider, "
        "per_second.",
        # processes
        "startup.failed": "`dispatcher run` or `dispatcher api` cannot start and exits; one line per mistake: reason, "
        "remedy.",
        "dispatcher.started": "The parent process runs: workers, run_dir, pid.",
        "dispatcher.stopped": "The parent and all of its processes have exited.",
        "dispatcher.draining": "The parent received a stop signal and drains its workers: signal.",
        "dispatcher.reloading": "The parent received SIGHUP, read the settings again, and replaces every process.",
        "dispatcher.reloaded": "The parent has replaced every process.",
        "dispatcher.reload_failed": "The parent received SIGHUP, but the new settings have mistakes. The processes "
        "keep the old settings: reason.",
        "dispatcher.scaled": "SIGTTIN or SIGTTOU changed the number of workers: workers.",
        "process.started": "The parent forked a worker, the relay or the monitor: role, pid.",
        "process.exited": "A worker, the relay or the monitor exited: role, pid, exit_status, reason (crashed, "
        "could_not_boot, hung, stopped; or, at the parent's request, reloaded, recycled, scaled_down, drained), "
        "retry_in_seconds, error (why it could not boot).",
        "process.hung": "The event loop of a process was blocked for DISPATCHER_HANG_SECONDS. The parent aborts and "
        "replaces the process: role, pid, silent_seconds.",
        "process.killed": "A process did not exit in time, and the parent killed it: role, pid.",
        "worker.drained": "A worker released the emails that it had not begun, and exits: sent, released.",
        "topology.unverified": "Bindings, arguments and policies of the queues could not be checked: reason.",
        "dlq.depth_inexact": "The monitor reads the depth of the DLQ over AMQP, which omits messages that a consumer "
        "holds: reason.",
        "alert.raised": "An operator has to act: severity, component, kind, phase, queue, count, oldest_age_seconds, "
        "correlation_ids, reason, database_unreachable, summary.",
        "alert.resolved": "The cause of an alert is over: kind, queue, summary.",
        "alert.channel_recovered": "An alert channel works again: channel, kind, phase.",
        "alert.delivery_failed": "An alert channel did not accept an alert: channel, kind, phase, reason, "
        "retry_in_seconds.",
        "monitor.stopped": "The monitor exits.",
        "relay.leading": "This relay publishes for the database; the relays of other hosts are on standby.",
        "relay.handed_over": "This relay cannot reach RabbitMQ, and a relay that can reach it publishes from now on.",
        "relay.stopped": "The relay exits.",
        "relay.published": "The relay published messages to the send queue: count.",
        "relay.republished": "RabbitMQ lost messages, for example because the queue was purged. Their emails are due "
        "again: count, queue, reason.",
        "relay.dead_lettered": "The relay published dead letters to the DLQ: count.",
        "relay.unroutable": "RabbitMQ could not route messages to a queue. Their emails stay due: count, queue, "
        "retry_in_seconds.",
        "relay.unconfirmed": "RabbitMQ did not confirm messages: the queue has no quorum or is full, or the connection "
        "was lost. Their emails stay due: count, queue, retry_in_seconds.",
        "api.started": "The HTTP API listens: listener.",
        "api.anonymous_allowed": "The HTTP API requires no key on the loopback, until the first key is created: "
        "setting.",
        "api.refused": "Requests that the HTTP API refused since the last such line, by reason: counts.",
        "api.stopped": "The HTTP API exits.",
        "config.restart_required": "The parent received SIGHUP, but these changed settings take effect only after a "
        "restart: variables.",
        "config.suspicious": "Settings that are valid, but probably not intended in combination: reason.",
        "emails.pruned": "Data older than the retention settings was deleted: partitions, and counts by kind.",
        "emails.pruning_postponed": "Another transaction locks data that is to be deleted; the deletion is retried: "
        "what, reason, retry_in_seconds.",
        "emails.pruning_failed": "Some old data could not be deleted; the rest was: what (a table or a kind), reason, "
        "retry_in_seconds.",
        "partition.created": "Partitions for the coming weeks were created: names.",
        "ledger.settled": "The relay settled the in-flight ledger of a worker that died, or that was frozen until its "
        "leases expired: worker, reason (worker_died, worker_frozen), released, recorded, uncertain.",
        "ledger.delayed": "The ledger of a dead worker cannot be settled yet, usually because PostgreSQL has not ended "
        "a session of that worker. Its leases are settled when they expire; other ledgers do not wait: file, reason.",
        "ledger.foreign": "A ledger in the run directory belongs to another database. The relay neither settles nor "
        "deletes it: file, database_id.",
        "ledger.lost": "The ledger of a running worker was deleted or replaced. The worker requests a replacement: "
        "file.",
        "ledger.unreadable": "A file in the run directory is not a ledger that this release can read. The relay keeps "
        "it: file, reason.",
        "http.listening": "The monitor serves /metrics and the health checks: listener.",
        "http.bind_failed": "The monitor cannot listen at its address, and retries: listener, reason, "
        "retry_in_seconds.",
        "metrics.unwritable": "The process cannot write its metric files. It goes on without counting: folder, reason.",
        "tracing.unavailable": "Spans are enabled, but this host cannot make them: reason, remedy.",
        "tracing.spans_dropped": "Spans could not be delivered and are lost: spans (the number since the last such "
        "line).",
        "error.unexpected": "An unexpected error, probably a bug: where, error.",
    }
)
