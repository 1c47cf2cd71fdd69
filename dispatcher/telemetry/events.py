"""Every log event, declared once: its name (`noun.verb_past`), when it is logged, and its fields.

A test asserts that the code logs every declared event and no other event. No field contains an address, a subject, a
body or a secret.

A process logs each event at most 100 times in 10 seconds. `storms.UNLIMITED` lists the exceptions. If lines were left
out, the event's first line after those 10 seconds has the field `suppressed`: the number of lines left out. If the
log's reader was stuck, the next line has the field `lines_dropped`: the number of lines that were lost before it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

EVENTS: Final = MappingProxyType(
    {
        # Events about emails and messages.
        "email.attempted": "An attempt ended. Fields: email_id, attempt, provider, outcome, status, error_type, "
        "provider_code, duration_ms, correlation_id, trace_id.",
        "email.refusal_undecided": "A provider refused an email, or could not be reached, and no other email "
        "shows yet whether the email or the provider is at fault. The worker keeps the lease and tries the email "
        "again; nothing is recorded. Fields: email_id, provider, error_type, provider_code, reason, retry_in_seconds.",
        "email.lease_lost": "A worker has a result for an email, but no longer has the email's lease. The attempt is "
        "recorded. The email's status can change only if recovery had made the email held. Fields: email_id, attempt, "
        "outcome.",
        "email.locked": "Another transaction holds locks on email rows. These emails wait; all other emails are sent. "
        "Fields: count, email_ids (the first few), lock_holders (sessions that may hold the locks: pid, application, "
        "state, age).",
        "email.statement_failed": "PostgreSQL cannot read or write one email, or RabbitMQ could not carry its message. "
        "All other emails are sent. Fields: email_id, reason.",
        "email.hold_reverted": "Recovery had made an email held, but now the email's worker or the worker's ledger "
        "proves that no byte of the email was sent. The email is pending again. Fields: email_id, correlation_id.",
        "email.recovered": "Recovery set the status of an email. Fields: reason (lease_expired: no worker renewed the "
        "email's lease; worker_crashed: the worker died while it rendered the email; promotion: PostgreSQL lost "
        "commits, so the email's outcome is uncertain), status (the new status).",
        "recipients.suppressed": "A worker did not send to suppressed recipients. Each worker logs at most one line "
        "per hour. Field: count (suppressed recipients since the previous line of this event).",
        "email.settled": "An event of the provider changed an email's status, because the event proves what happened "
        "to the email. Fields: email_id, correlation_id, provider, previous_status, status.",
        "email.cancelled": "The relay cancelled an email because the email has expired. It will not be sent. Fields: "
        "email_id, correlation_id, previous_status, reason (expired).",
        "message.duplicated": "A worker acknowledged a message without sending its email, because the email was "
        "already finished, not due, or leased by another worker. Fields: email_id, status (of the email).",
        "message.returned": "A worker received a dead letter that an operator had moved to a send queue, and returned "
        "it to the DLQ. Fields: email_id, remedy (the command that sends the email again).",
        "message.rejected": "A worker rejected a message that points to no email, and RabbitMQ moved the message to "
        "the DLQ. Fields: reason, and octets (the size of an unreadable message) or email_id.",
        # Events about RabbitMQ, PostgreSQL, providers and operators' controls.
        "broker.connected": "The process is connected to RabbitMQ. Field: queues (the queues that the worker consumes; "
        "other processes leave out this field).",
        "broker.connection_lost": "RabbitMQ is unreachable. The process tries to reconnect, and waits longer after "
        "each try. Fields: reason, retry_in_seconds.",
        "store.connection_lost": "PostgreSQL is unreachable. The process keeps the results that it could not record, "
        "and tries to reconnect. Fields: reason, retry_in_seconds.",
        "store.connected": "PostgreSQL is reachable again.",
        "store.commits_waiting": "Commits wait for a synchronous standby and keep email rows locked. Fields: count, "
        "email_ids (the first few), lock_holders (the sessions that wait).",
        "store.promoted": "PostgreSQL runs on a new timeline: a standby was promoted, or a backup was restored. If "
        "lossy is true, the last commits may be lost, so the emails that are now leased or due may already have been "
        "sent. Fields: timeline, previous_timeline, lossy, leases (how many of these emails are leased), messages (how "
        "many are due).",
        "provider.paused": "A worker sends no email through this provider for now, because the provider cannot be "
        "reached, throttles us, or refuses every email. Fields: provider, state (of the circuit breaker), reason, "
        "seconds (until the next try).",
        "provider.resumed": "A worker sends emails through this provider again. Field: provider.",
        "broker.queue_missing": "The send queue of a lane does not exist. The worker consumes the queues of all other "
        "lanes, and consumes this queue as soon as the queue exists. Fields: queue, lane, remedy.",
        "controls.changed": "Operators paused or resumed something, and a worker applied the change. Fields: paused "
        "and resumed (what the operators paused and resumed, separated by commas).",
        "email.no_channel": "A worker leased an SMS, or a message of another channel, but its host has no provider for "
        "this channel. The message is due again after half a minute, for any host. Set DISPATCHER_SMS_PROVIDERS on all "
        "hosts; for the channel test, upgrade the host. Each worker logs at most one line in half a minute. Fields: "
        "email_id and channel (of the last such message), count (of such messages since the previous line of "
        "this event).",
        "recipients.opt_out_failed": "A provider reported that a recipient wants no more messages, but PostgreSQL "
        "could not store the suppression. The provider repeats the report for the next message to this recipient. "
        "Fields: email_id, reason.",
        "provider.token_not_renewed": "A process could not renew the access token with which it logs in. The old token "
        "is still valid, and the process tries again. Fields: provider, reason, retry_in_seconds.",
        "provider.throttled": "A provider throttled a worker, so the rate of all workers for this provider was halved. "
        "Fields: provider, per_second (the new rate).",
        # Events about processes and services.
        "service.refused": "PostgreSQL refused a statement of a periodic service, usually because of a damaged row. "
        "The other services continue, and this service tries again at its interval. Logged once until a round "
        "succeeds. Fields: service, reason.",
        "startup.failed": "`dispatcher run` or `dispatcher api` cannot start, and exits. Each mistake has its own "
        "line. Fields: reason, remedy.",
        "dispatcher.started": "The parent process runs. Fields: workers, run_dir, pid.",
        "dispatcher.stopped": "The parent and all of its processes have exited.",
        "dispatcher.draining": "The parent received a stop signal and drains its workers. Field: signal.",
        "dispatcher.reloading": "The parent received SIGHUP, read the settings again, and replaces every process.",
        "dispatcher.reloaded": "The parent has replaced every process.",
        "dispatcher.reload_failed": "The parent received SIGHUP, but the new settings are invalid. The processes keep "
        "the old settings. Field: reason.",
        "dispatcher.scaled": "SIGTTIN or SIGTTOU changed the number of workers. Field: workers.",
        "process.started": "The parent forked a worker, the relay or the monitor. Fields: role, pid.",
        "process.exited": "A worker, the relay or the monitor exited. Fields: role, pid, exit_status, reason (crashed, "
        "could_not_boot, hung, stopped; or, at the parent's request, reloaded, recycled, scaled_down, drained), "
        "retry_in_seconds, error (why it could not boot).",
        "process.hung": "The event loop of a process was blocked for DISPATCHER_HANG_SECONDS. The parent aborts and "
        "replaces the process. Fields: role, pid, silent_seconds.",
        "process.killed": "A process did not exit in time, and the parent killed it. Fields: role, pid.",
        "worker.drained": "A worker released the emails that it had not begun to send, and exits. Fields (numbers of "
        "emails): sent, released.",
        "topology.unverified": "The process could not check the bindings, arguments and policies of the queues. Field: "
        "reason.",
        "dlq.not_swept": "A monitor could not remove dead letters from the DLQ that are not about their email's "
        "current failure; the next probe tries again. Fields: reason, remedy.",
        "dlq.swept": "A monitor removed dead letters from the DLQ that are not about their email's current failure, "
        "such as the dead letters of replayed emails. Field: count.",
        "dlq.depth_inexact": "The monitor reads the depth of the DLQ over AMQP. AMQP does not count messages that a "
        "consumer has received but not acked, so the depth can be too low. Field: reason.",
        "host.name_shared": "Several hosts have used the same DISPATCHER_HOST_NAME for a while. Each host needs its "
        "own. Field: host.",
        "alert.raised": "An operator has to act. Fields: severity, component, kind, phase (raised, reminded or test), "
        "queue, count, oldest_age_seconds, correlation_ids, reason, database_unreachable, summary.",
        "alert.resolved": "The condition that raised an alert no longer exists. Fields: kind, queue, summary.",
        "alert.channel_recovered": "An alert channel works again. Fields: channel, and kind and phase of the alert "
        "that the channel accepted (phase: raised, reminded or resolved).",
        "alert.delivery_failed": "An alert channel did not accept an alert. Fields: channel, kind and phase of "
        "the alert (phase: raised, reminded or resolved), reason, retry_in_seconds.",
        "bounces.read": "The monitor read messages from the Maildir of bounces. Fields (numbers of messages): stored, "
        "waiting (another transaction has locked the email's row), forged (without a valid token), unreadable.",
        "bounces.unavailable": "The monitor cannot use the Maildir of bounces, and retries. Fields: folder, reason, "
        "retry_in_seconds.",
        "webhook.failing": "A webhook's receiver accepts no event. The webhook's events wait, and the monitor tries "
        "the receiver again at least every half hour. Fields: webhook (its number), reason.",
        "webhook.recovered": "A webhook's receiver accepts events again. Field: webhook (its number).",
        "webhook.disabled": "A webhook's receiver accepted no event for about 27 hours, or answered 410. The webhook "
        "gets no further events until an operator enables it. Fields: webhook (its number), reason.",
        "webhook.event_given_up": "A receiver refused one event at every attempt, although it accepted other events. "
        "Fields: webhook, event_id, reason.",
        "webhook.feed_restored": "The database was restored from a dump of another PostgreSQL server. The monitor has "
        "adapted the feed to the new server, so that webhooks and applications get the feed's events.",
        "monitor.stopped": "The monitor exits.",
        "relay.leading": "This relay publishes for the database; the relays of other hosts are on standby.",
        "relay.handed_over": "This relay cannot reach RabbitMQ, so from now on the relay of another host publishes.",
        "relay.stopped": "The relay exits.",
        "relay.published": "The relay published messages to the send queues. Field: count.",
        "relay.republished": "RabbitMQ lost messages, for example because the queue was purged. Their emails are due "
        "again. Fields: count, queue, reason.",
        "relay.dead_lettered": "The relay published dead letters to the DLQ. Field: count.",
        "relay.unroutable": "RabbitMQ could not route messages to a queue. Their emails stay due. Fields: count, "
        "queue, retry_in_seconds, reason (the queue is missing, or was not bound and is bound now).",
        "relay.unconfirmed": "RabbitMQ did not confirm messages: the queue has no quorum or is full, or the connection "
        "was lost. Their emails stay due. Fields: count, queue, retry_in_seconds.",
        "api.started": "The HTTP API listens. Field: listener.",
        "api.anonymous_allowed": "Until the first key is created, the HTTP API accepts requests without a key on the "
        "loopback interface. Field: setting (the setting that allows this).",
        "api.refused": "The HTTP API refused requests. Field: counts (by reason, since the previous line of this "
        "event).",
        "api.stopped": "The HTTP API exits.",
        "submission.started": "The SMTP server listens. Fields: listener, tls.",
        "submission.refused": "The SMTP server refused logins or messages. Field: counts (by reason, since the "
        "previous line of this event).",
        "submission.stopped": "The SMTP server exits.",
        "ops.sign_in_failed": "A sign-in to the operators' page with OpenID Connect failed. Field: reason.",
        "events.skipped": "A provider's request contains events that cannot be read, or that have an unknown kind. "
        "These events are not stored. All other events of the request are stored. Fields: provider, counts (by "
        "reason).",
        "events.source_unavailable": "A server that the dispatcher needs for a provider's events is unavailable, or "
        "refuses a call. Fields: provider, reason, retry_in_seconds (null if the provider sends the events again by "
        "itself).",
        "events.subscription_confirmed": "The API confirmed the subscription of an allowed SNS topic. Field: topic.",
        "events.subscription_ended": "The API's subscription to an SNS topic was deleted, so the API gets no more "
        "events of the topic. Field: topic.",
        "config.restart_required": "The parent received SIGHUP. Some changed settings take effect only after a "
        "restart. Field: variables (these settings).",
        "config.suspicious": "Settings are valid, but their combination is probably not intended. Field: reason.",
        "emails.pruned": "The monitor deleted data that is older than the retention settings allow. Fields: partitions "
        "(the names of deleted partitions), and the number of other deletions by kind.",
        "emails.pruning_postponed": "Old data could not be deleted yet, because another transaction has locked it. The "
        "monitor will try again. Fields: what (a table or a kind of data), reason, retry_in_seconds.",
        "emails.pruning_failed": "Some old data could not be deleted; all other old data was deleted. Fields: what (a "
        "table or a kind of data), reason, retry_in_seconds.",
        "emails.deliveries_filled": "After an upgrade, every email has the delivery state that follows from the events "
        "which the earlier release stored.",
        "partition.created": "The relay created partitions for the coming weeks. Field: names.",
        "partition.summarized": "The BRIN index of these partitions had missing or unfinished summaries, so look-ups "
        "by recipient read too many rows. The monitor created the summaries again. Field: names.",
        "ledger.settled": "The relay settled the in-flight ledger of a worker that died, or that was frozen until its "
        "leases expired. Fields: worker, reason (worker_died, worker_frozen), and "
        "the numbers of emails: released, recorded, uncertain.",
        "ledger.delayed": "The ledger of a dead worker cannot be settled yet, usually because PostgreSQL has not ended "
        "a session of that worker. The worker's leases are recovered when they expire. Other ledgers are not delayed. "
        "Fields: file, reason.",
        "ledger.foreign": "A ledger in the run directory belongs to another database. The relay neither settles nor "
        "deletes it. Fields: file, database_id.",
        "ledger.lost": "The ledger of a running worker was deleted, or another file has the ledger's name. The worker "
        "asks the parent for a replacement. Field: file.",
        "ledger.unreadable": "A file in the run directory is not a ledger that this release can read. The relay keeps "
        "it. Fields: file, reason.",
        "http.listening": "The monitor serves /metrics and the health checks. Field: listener.",
        "http.bind_failed": "The monitor cannot listen at its address, and retries. Fields: listener, reason, "
        "retry_in_seconds.",
        "metrics.unwritable": "The process cannot write its metric files. It continues without counting. Fields: "
        "folder, reason.",
        "tracing.unavailable": "Spans are enabled, but this host cannot create them. Fields: reason, remedy.",
        "tracing.spans_dropped": "Spans could not be delivered and are lost. Field: spans (how many since the previous "
        "line of this event).",
        "error.unexpected": "An unexpected error, probably a bug. Fields: where, error; request_id in the API.",
    }
)
