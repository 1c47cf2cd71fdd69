-- The rights of each kind of role. `dispatcher topology grants` replaces {role} by the role's name. PostgreSQL checks
-- only the rights on the table that a statement names, so no role needs rights on the weekly partitions. Identity
-- columns, LISTEN and NOTIFY need no rights, either. No default privilege is granted for later tables, because a reader
-- could then read the content of emails.

-- name: revoke_producer
-- Takes the rights that earlier releases granted to an application, and that the library of this release does not need.
-- Executed before grant_producer, in the same transaction. No rows.
revoke all on dispatcher.email_idempotency from {role};

-- name: grant_producer
-- An application that enqueues with the library: it inserts emails, and finds their ids by their keys. No rows.
grant usage on schema dispatcher to {role};
grant insert on
    dispatcher.email_log, dispatcher.email_content, dispatcher.email_attachment, dispatcher.email_recipient
    to {role};
grant insert (tenant_id, message_key, email_id, payload_hash), select (email_id) on dispatcher.email_idempotency
    to {role};
grant execute on function dispatcher.hash_addresses, dispatcher.find_keys to {role};
grant select (email_id, publish_due_at) on dispatcher.email_log to {role};
grant select on dispatcher.lane_policy, dispatcher.lane_rule, dispatcher.relay_polls to {role};

-- name: grant_dispatcher
-- `dispatcher run`, `dispatcher api` and all operator commands except `init`, which needs the owner. No rows.
grant usage on schema dispatcher to {role};
grant select, insert, update on
    dispatcher.email_log, dispatcher.email_hourly, dispatcher.provider_rate, dispatcher.api_key,
    dispatcher.relay_timeline, dispatcher.alert_check
    to {role};
grant select, update on dispatcher.outgoing_feed, dispatcher.email_stat_progress to {role};
grant select, insert, update, delete on
    dispatcher.email_idempotency, dispatcher.email_replay, dispatcher.email_replay_item, dispatcher.api_key_day,
    dispatcher.provider_state, dispatcher.alert_told, dispatcher.host_presence, dispatcher.suppression,
    dispatcher.outgoing_event, dispatcher.webhook, dispatcher.webhook_retry, dispatcher.pause,
    dispatcher.lane_policy, dispatcher.lane_rule, dispatcher.tenant_limit, dispatcher.domain_limit,
    dispatcher.domain_line, dispatcher.ops_session, dispatcher.minute_sample, dispatcher.named_lock,
    dispatcher.sns_certificate, dispatcher.email_stat, dispatcher.email_stat_open
    to {role};
grant select, update, delete on dispatcher.delivery_backfill to {role};
grant select, insert, delete on
    dispatcher.email_content, dispatcher.email_attachment, dispatcher.email_recipient, dispatcher.inbound_message,
    dispatcher.ops_sign_in, dispatcher.relay_polls
    to {role};
grant select, insert on dispatcher.email_attempt, dispatcher.email_event, dispatcher.operator_audit to {role};
grant update (error) on dispatcher.email_attempt to {role};
grant update (event_key, address_hash, detail) on dispatcher.email_event to {role};
grant select on
    dispatcher.every_attempt, dispatcher.dispatcher_migration, dispatcher.dispatcher_database, dispatcher.email_log_default,
    dispatcher.email_content_default, dispatcher.email_attachment_default, dispatcher.email_attempt_default
    to {role};
grant execute on function
    dispatcher.email_id_lowest_at, dispatcher.email_partitions_ended, dispatcher.hash_addresses,
    dispatcher.find_keys, dispatcher.recipient_domains, dispatcher.find_recipients, dispatcher.find_metadata,
    dispatcher.email_log_must_stay, dispatcher.email_log_enqueued_since, dispatcher.email_partitions_make,
    dispatcher.email_partition_prune(text, timestamptz, timestamptz), dispatcher.operator_audit_prune,
    dispatcher.email_recipient_summarize, dispatcher.named_lock_holder, dispatcher.advisory_lock_holders,
    dispatcher.email_delivery_of
    to {role};

-- name: grant_reader
-- Commands that only read: `status`, `held list`, `dlq list`, `show`, `replays`, `prune --dry-run`. No access to
-- addresses, subjects, bodies or API keys. No rows.
grant usage on schema dispatcher to {role};
grant select on
    dispatcher.email_log, dispatcher.every_attempt, dispatcher.email_attempt, dispatcher.email_event,
    dispatcher.email_recipient, dispatcher.email_hourly, dispatcher.email_replay, dispatcher.email_replay_item,
    dispatcher.operator_audit, dispatcher.provider_state, dispatcher.provider_rate, dispatcher.host_presence,
    dispatcher.outgoing_event, dispatcher.outgoing_feed, dispatcher.pause, dispatcher.minute_sample,
    dispatcher.alert_check, dispatcher.lane_policy, dispatcher.domain_limit, dispatcher.email_stat
    to {role};
grant select (email_id, tags, metadata) on dispatcher.email_content to {role};
grant select (recipients_since) on dispatcher.dispatcher_database to {role};
grant select (tenant_id, message_key, email_id) on dispatcher.email_idempotency to {role};
grant execute on function
    dispatcher.email_id_lowest_at, dispatcher.email_partitions_ended, dispatcher.hash_addresses,
    dispatcher.recipient_domains, dispatcher.email_log_must_stay, dispatcher.email_log_enqueued_since,
    dispatcher.named_lock_holder, dispatcher.advisory_lock_holders
    to {role};
