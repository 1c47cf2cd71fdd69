-- name: find_email
-- One email without private columns, by its id or, without an id, by its tenant and message key; with a tenant, only if
-- the email belongs to it. Zero rows: there is no such email.
select
    email_id, tenant_id, message_key, coalesce(channel, 'email') as channel, status, delivery::text, lane,
    topic, wait_until, wait_reason, due_since as send_at, expires_at, redelivery_count, attempt_count, attempt_base,
    was_uncertain, crash_count, on_uncertain, correlation_id, traceparent, error_type, last_error, provider,
    provider_message_id, locked_by, nullif(locked_until, 'epoch') as locked_until, created_at,
    published_at, leased_at, sent_at, settled_at, publish_due_at, dead_letter_due_at, dead_lettered_at,
    dead_letter_discarded_at, recipient_outcomes, resent_from, resent_as
from dispatcher.email_log
where email_id = coalesce(
        %(email_id)s::uuid,
        (
            select k.email_id
            from dispatcher.email_idempotency as k
            where k.tenant_id = %(tenant_id)s::text
                and k.message_key = %(message_key)s::text
        )
    )
    and (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s);

-- name: find_ids_by_key
-- The emails that have these message keys. If a key is missing in the result, no email has this key.
select message_key, email_id
from dispatcher.email_idempotency
where tenant_id = %(tenant_id)s
    and message_key = any(%(message_keys)s);

-- name: find_tenants_of_key
-- The emails that have a message key, with their tenants; searches at most most_tenants tenants. Steps from tenant to
-- tenant in the primary key, which begins with the tenant.
with recursive tenant (tenant_id, position) as (
    select min(tenant_id), 1
    from dispatcher.email_idempotency
    union all
    select
        (select min(k.tenant_id) from dispatcher.email_idempotency as k where k.tenant_id > t.tenant_id),
        t.position + 1
    from tenant as t
    where t.tenant_id is not null
        and t.position < %(most_tenants)s
)
select t.tenant_id, k.email_id
from tenant as t
join dispatcher.email_idempotency as k on k.tenant_id = t.tenant_id and k.message_key = %(message_key)s
order by t.tenant_id;

-- name: list_attempts
-- The attempts of an email, in order. Without an error type, the column `error` has the provider's answer.
select
    attempt_number as attempt, worker, provider, started_at, finished_at, outcome, error_type, provider_code,
    case when error_type is not null then error end as error,
    case when error_type is null then error end as answer
from dispatcher.every_attempt
where email_id = %(email_id)s
order by attempt_number, started_at;

-- name: list_events
-- What providers reported about an email, ordered by the providers' clocks.
select happened_at, kind, bounce, provider, code, detail, doubt, received_at, address_hash
from dispatcher.email_event
where email_id = %(email_id)s
order by happened_at, received_at, event_key;

-- name: may_read_recipients
-- Whether this role has the rights to compare recipients with the hashes of events.
select
    has_column_privilege('dispatcher.email_content', 'recipients', 'select')
    and has_column_privilege('dispatcher.dispatcher_database', 'address_key', 'select');

-- name: list_acts
-- The actions of operators on an email, in order.
select acted_at, actor, action, reason, detail
from dispatcher.operator_audit
where email_id = %(email_id)s
order by audit_id;

-- name: was_revealed
-- A row: this actor has revealed the email's content in the last `seconds`.
select audit_id
from dispatcher.operator_audit
where email_id = %(email_id)s
    and action = 'reveal'
    and actor = %(actor)s
    and acted_at > clock_timestamp() - %(seconds)s * interval '1 second'
limit 1;

-- name: list_replays_of
-- The replays that included an email, in order.
select r.replay_id, r.actor, r.reason, i.outcome, i.settled_at
from dispatcher.email_replay_item as i
join dispatcher.email_replay as r using (replay_id)
where i.email_id = %(email_id)s
order by r.replay_id;

-- name: reveal_content
-- An email's private content and recipients. Zero rows: the content was deleted.
select sender, recipients, subject, text_body, html_body, template_id, template_data, headers, tags
from dispatcher.email_content
where email_id = %(email_id)s;
