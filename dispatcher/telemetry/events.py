"""Every log event that we emit, declared once: its name (`noun.verb_past`) and what it tells.

A test asserts that each is used and that none is used without standing here. Fields never hold an address, a subject,
a body or a secret.

One kind of event comes at most a hundred times in ten seconds from one process, `email.attempted` excepted; the first
line afterwards says how many were `suppressed`. Where the log's reader was stuck, the first line that got through again
says how many were lost, as `lines_lost`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

EVENTS: Final = MappingProxyType(
    {
        # one email
        "email.attempted": "An attempt ended: email_id, attempt, provider, outcome, error_type, duration_ms, "
        "correlation_id, trace_id, worker.",
        "email.lease_lost": "A result came after the lease was lost. For an email that a rescue holds it is evidence; "
        "else it overwrites nothing.",
        "email.locked": "Somebody else's transaction holds emails' rows; these wait and the others go on: count, "
        "email_ids (a few), held_by (sessions that it may be: pid, application, state, age).",
        "email.refused": "PostgreSQL refuses to read or write one email, and the others go on without it: email_id, "
        "reason.",
        "email.recovered": "An email that a rescue held is pending again: its worker or ledger came back, and proves "
        "that nothing of it had left.",
        "email.rescued": "An email was taken from an owner that is gone, or is uncertain since PostgreSQL lost "
        "commits: reason (lease_expired, worker_crashed, promotion), status.",
        "message.duplicated": "A message came for an email that is finished or another's; it was acked: status.",
        "message.returned": "A dead letter was put back on the send queue: replayed, refused or stale: verdict.",
        "message.rejected": "A message that points to no email went to the DLQ: reason.",
        # servers
        "broker.connected": "RabbitMQ answers and we consume.",
        "broker.connection_lost": "RabbitMQ is away; we connect again with growing waits: reason, retry_in_seconds.",
        "store.connection_lost": "PostgreSQL is away; results are kept and tried again: reason, retry_in_seconds.",
        "store.connected": "PostgreSQL answers again.",
        "store.commits_waiting": "Commits wait for a synchronous standby, and keep emails' rows locked: count, "
        "email_ids (a few), held_by (the sessions that wait).",
        "store.promoted": "PostgreSQL is on another timeline: a standby was promoted, or a backup restored. If that "
        "lost commits (lossy), what was leased or published before is uncertain: timeline, timeline_before, lossy, "
        "leases, messages.",
        "provider.paused": "The provider cannot be used as a whole; its emails wait: provider, state, reason, seconds.",
        "provider.resumed": "The provider can be used again: provider.",
        "provider.slowed": "The provider throttled us, and its rate is halved for all workers: provider, per_second.",
        # processes
        "start.refused": "`dispatcher run` or `api` cannot start, and exits: reason, remedy; one line per mistake.",
        "dispatcher.started": "The parent runs: workers, run_dir.",
        "dispatcher.stopped": "The parent and all that it started have ended.",
        "dispatcher.draining": "A stop was asked for: signal.",
        "dispatcher.reloading": "SIGHUP: settings were read again, and every process is replaced.",
        "dispatcher.reloaded": "Every process has been replaced.",
        "dispatcher.reload_failed": "SIGHUP, but the settings that were read are mistaken; nothing changes: reason.",
        "dispatcher.scaled": "SIGTTIN or SIGTTOU: workers, from now on.",
        "process.started": "A worker, the relay or the monitor was forked: role, pid.",
        "process.exited": "One of them ended: role, pid, how, reason (crashed, could_not_boot, hung, stopped; where we "
        "asked for it reloaded, recycled, scaled_down, drained), retry_in_seconds, error (why it could not boot).",
        "process.hung": "The loop of one of them stood still; it is aborted and replaced: role, pid, silent_seconds.",
        "process.killed": "One of them did not end in time: role, pid.",
        "worker.drained": "A worker gave back what it had not begun and ended: sent, released.",
        "topology.unverified": "Bindings and policies of our queues were not looked at: reason.",
        "probe.limited": "The DLQ's depth is asked for by AMQP, which does not count what somebody holds: reason.",
        "alert.raised": "A person has to act: severity, component, kind, phase, queue, count, oldest_age_seconds, "
        "correlation_ids, reason, alone, summary.",
        "alert.resolved": "What an alert told of is over: kind, queue, summary.",
        "alert.delivered": "A channel takes alerts again: channel, kind, phase.",
        "alert.undelivered": "A channel did not take an alert: channel, kind, phase, reason, retry_in_seconds.",
        "monitor.stopped": "The monitor ended.",
        "relay.leading": "This relay publishes for the database; others stand by.",
        "relay.handed_over": "RabbitMQ is away from this relay while another one reaches it: that one publishes now.",
        "relay.stopped": "The relay ended.",
        "relay.published": "Messages went to the send queue: count.",
        "relay.republished": "RabbitMQ lost messages, as of a purged queue; they are due again: count, queue, reason.",
        "relay.dead_lettered": "Dead letters went to the DLQ: count.",
        "relay.unroutable": "RabbitMQ could not route messages; they stay due: count, queue, retry_in_seconds.",
        "relay.unconfirmed": "RabbitMQ did not confirm messages: the queue has no quorum or is full, or the connection "
        "was lost; they stay due: count, queue, retry_in_seconds.",
        "api.started": "The HTTP API listens: listener.",
        "api.opened": "The HTTP API asks nobody on this host for a key, until there is one: setting.",
        "api.refused": "What the HTTP API refused since it last told, by reason: counts.",
        "api.stopped": "The HTTP API ended.",
        "settings.kept": "SIGHUP: these settings have changed, but need a restart to take effect: variables.",
        "settings.doubted": "Settings go together, and are hardly meant so: reason.",
        "emails.pruned": "What was older than the settings keep it was forgotten: partitions, and counts by kind.",
        "emails.pruning_postponed": "Another transaction holds what is to be forgotten: what, reason, "
        "retry_in_seconds.",
        "emails.pruning_failed": "A part of what is old could not be forgotten; the others were: what (a table or a "
        "kind), reason, retry_in_seconds.",
        "partition.made": "Partitions were made ahead: names.",
        "ledger.settled": "An in-flight ledger was settled, as its worker died or was frozen past its leases: worker, "
        "reason (worker_died, worker_frozen), released, recorded, uncertain.",
        "ledger.delayed": "A dead worker's ledger cannot be settled yet, mostly because PostgreSQL does not end one of "
        "its sessions; its leases are settled as they run out, other ledgers at once: file, reason.",
        "ledger.foreign": "A ledger in the run directory is of another database; nothing of it is settled or deleted: "
        "file, database_id.",
        "ledger.lost": "A worker's ledger was deleted or replaced; the worker asks for a successor: file.",
        "ledger.unreadable": "A file in the run directory is no ledger that we can read; it is kept: file, reason.",
        "web.listening": "The monitor serves its pages: listener.",
        "web.unheard": "The monitor cannot have its address, and tries again: listener, reason, retry_in_seconds.",
        "metrics.unwritable": "This process counts nothing, and works on: folder, reason.",
        "tracing.unavailable": "Spans are wanted, and this host makes none: reason, remedy.",
        "tracing.undelivered": "Nobody took spans, and they are lost: spans, how many since the last time.",
        "fault.unexpected": "Something failed that should not: where, error.",
    }
)
