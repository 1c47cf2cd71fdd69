-- name: find_tenant_email
-- One email without content, for its tenant. No row: the tenant has no such email.
select
    email_id, message_key, status, attempt_count, correlation_id, error_type, last_error, provider, provider_message_id,
    created_at, sent_at
from dispatcher.email_log
where email_id = %(email_id)s
    and tenant_id = %(tenant_id)s;

-- name: find_tenant_email_by_key
-- As find_tenant_email, by message key.
select
    e.email_id, e.message_key, e.status, e.attempt_count, e.correlation_id, e.error_type, e.last_error, e.provider,
    e.provider_message_id, e.created_at, e.sent_at
from dispatcher.email_idempotency as k
join dispatcher.email_log as e on e.email_id = k.email_id
where k.tenant_id = %(tenant_id)s
    and k.message_key = %(message_key)s;

-- name: list_email_attempts
-- The attempts of an email, in order.
select attempt_number, provider, started_at, finished_at, outcome, error_type, error, provider_code
from dispatcher.email_attempt
where email_id = %(email_id)s
order by attempt_number, started_at;

-- name: list_tenant_emails
-- A page of a tenant's emails, newest first, between two ids. Reads at most `examined` rows for every filter, so each
-- page costs about the same. The last column is the id below which the next page starts, null after the last page. This
-- column is returned even if no email matches.
with examined as (
    select
        email_id, tenant_id, message_key, status, attempt_count, correlation_id, error_type, last_error, provider,
        provider_message_id, created_at, sent_at
    from dispatcher.email_log
    where email_id < %(below_id)s
        and email_id >= %(from_id)s
    order by email_id desc
    limit %(examined)s
),
wanted as (
    select *
    from examined
    where tenant_id = %(tenant_id)s
        and (%(status)s::text is null or status = %(status)s)
        and (%(error_type)s::text is null or error_type = %(error_type)s)
        and (%(provider)s::text is null or provider = %(provider)s)
        and (%(correlation_id)s::text is null or correlation_id = %(correlation_id)s)
    order by email_id desc
    limit %(limit)s
)
select
    w.email_id, w.message_key, w.status, w.attempt_count, w.correlation_id, w.error_type, w.last_error, w.provider,
    w.provider_message_id, w.created_at, w.sent_at, bound.lowest_id
from (
    select case when count(*) < %(examined)s then null else min(email_id::text)::uuid end as lowest_id
    from examined
) as bound
left join wanted as w on true
order by w.email_id desc;

-- name: list_unfinished_tenant_emails
-- As list_tenant_emails, for one status other than `sent`: uses the partial index on that status.
with examined as (
    select
        email_id, tenant_id, message_key, status, attempt_count, correlation_id, error_type, last_error, provider,
        provider_message_id, created_at, sent_at
    from dispatcher.email_log
    where status = %(status)s
        and status <> 'sent'
        and email_id < %(below_id)s
        and email_id >= %(from_id)s
    order by email_id desc
    limit %(examined)s
),
wanted as (
    select *
    from examined
    where tenant_id = %(tenant_id)s
        and (%(error_type)s::text is null or error_type = %(error_type)s)
        and (%(provider)s::text is null or provider = %(provider)s)
        and (%(correlation_id)s::text is null or correlation_id = %(correlation_id)s)
    order by email_id desc
    limit %(limit)s
)
select
    w.email_id, w.message_key, w.status, w.attempt_count, w.correlation_id, w.error_type, w.last_error, w.provider,
    w.provider_message_id, w.created_at, w.sent_at, bound.lowest_id
from (
    select case when count(*) < %(examined)s then null else min(email_id::text)::uuid end as lowest_id
    from examined
) as bound
left join wanted as w on true
order by w.email_id desc;

-- name: find_recipients
-- The addresses of emails, as lists under "to", "cc" and "bcc". No row for an email whose content was deleted.
select email_id, recipients
from dispatcher.email_content
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s;
