-- name: find_tenant_email
-- One email without content, for its tenant. No row: the tenant has no such email.
select
    email_id, message_key, status, attempt_count, correlation_id, error_type, last_error, provider, provider_message_id,
    created_at, sent_at, lane, published_at, leased_at, settled_at, dead_lettered_at, dead_letter_discarded_at,
    coalesce(channel, 'email') as channel, recipient_outcomes
from dispatcher.email_log
where email_id = %(email_id)s
    and tenant_id = %(tenant_id)s;

-- name: find_tenant_email_by_key
-- As find_tenant_email, by message key.
select
    e.email_id, e.message_key, e.status, e.attempt_count, e.correlation_id, e.error_type, e.last_error, e.provider,
    e.provider_message_id, e.created_at, e.sent_at, e.lane, e.published_at, e.leased_at, e.settled_at,
    e.dead_lettered_at, e.dead_letter_discarded_at, coalesce(e.channel, 'email') as channel, e.recipient_outcomes
from dispatcher.email_idempotency as k
join dispatcher.email_log as e on e.email_id = k.email_id
where k.tenant_id = %(tenant_id)s
    and k.message_key = %(message_key)s;

-- name: list_email_attempts
-- The attempts of an email, in order.
select attempt_number, provider, started_at, finished_at, outcome, error_type, error, provider_code
from dispatcher.every_attempt
where email_id = %(email_id)s
order by attempt_number, started_at;

-- name: find_recipients
-- The addresses of emails, as lists under "to", "cc" and "bcc". No row for an email whose content was deleted.
select email_id, recipients
from dispatcher.email_content
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s;

-- name: find_recipient_hashes
-- The first 6 bytes of the hash of each recipient, also of emails whose content was deleted. Takes some milliseconds per
-- email in a large table, because the index is small and inexact. No row: the recipient was erased.
select email_id, array_agg(address_hash)
from dispatcher.email_recipient
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
group by email_id;
