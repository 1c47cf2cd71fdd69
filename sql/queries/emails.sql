-- part: is_given
-- Whether an email is one of the given ones. With the lowest and the highest id, PostgreSQL skips the weekly partitions
-- that contain none of them.
email_id = any(%(email_ids)s) and email_id between %(lowest_id)s and %(highest_id)s

-- name: find_tenant_email
-- One email without content, for its tenant: by its id or, without an id, by its message key. No row: the tenant has no
-- such email.
select
    email_id, message_key, status, attempt_count, correlation_id, error_type, last_error, provider, provider_message_id,
    created_at, sent_at, lane, published_at, leased_at, settled_at, dead_lettered_at, dead_letter_discarded_at,
    coalesce(channel, 'email') as channel, recipient_outcomes
from dispatcher.email_log
where tenant_id = %(tenant_id)s
    and email_id = coalesce(
        %(email_id)s::uuid,
        (
            select k.email_id
            from dispatcher.email_idempotency as k
            where k.tenant_id = %(tenant_id)s
                and k.message_key = %(message_key)s::text
        )
    );

-- name: find_recipients
-- The addresses of emails, as lists under "to", "cc" and "bcc". No row for an email whose content was deleted.
select email_id, recipients
from dispatcher.email_content
where {is_given};

-- name: find_recipient_hashes
-- The first 6 bytes of the hash of each recipient, also of emails whose content was deleted. Takes some milliseconds per
-- email in a large table, because the index is small and inexact. No row: the recipient was erased.
select email_id, array_agg(address_hash)
from dispatcher.email_recipient
where {is_given}
group by email_id;
