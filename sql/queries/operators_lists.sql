-- part: is_cut
-- Whether the search for a page stopped before it found enough rows.
(select count(*) from examined) = %(examined)s and (select count(*) from wanted) < %(limit)s

-- name: list_recent_events
-- A page of what providers reported, newest first. Reads at most `examined` events, whatever the filters, so each page
-- takes about the same time. If the search stops there, the last row is the last event that was read, with nulls.
with examined as (
    select received_at, email_id, event_key, happened_at, provider, kind, bounce, code, detail, doubt
    from dispatcher.email_event
    where (received_at, email_id, event_key)
        < (coalesce(%(after_received_at)s::timestamptz, 'infinity'), %(after_email_id)s::uuid, %(after_event_key)s::bytea)
        and received_at >= coalesce(%(since)s::timestamptz, '-infinity')
    order by received_at desc, email_id desc, event_key desc
    limit %(examined)s
),
wanted as (
    select x.*, e.tenant_id, e.message_key
    from examined as x
    join dispatcher.email_log as e on e.email_id = x.email_id
    where (%(provider)s::text is null or x.provider = %(provider)s)
        and (%(kind)s::text is null or x.kind = %(kind)s)
        and (%(bounce)s::text is null or x.bounce = %(bounce)s)
        and (%(tenant_id)s::text is null or e.tenant_id = %(tenant_id)s)
    order by x.received_at desc, x.email_id desc, x.event_key desc
    limit %(limit)s
)
select
    received_at, email_id, encode(event_key, 'hex') as event_key, happened_at, provider, kind, bounce, code, detail,
    doubt, tenant_id, message_key
from wanted
union all
(
    select received_at, email_id, encode(event_key, 'hex'), null, null, null, null, null, null, null, null, null
    from examined
    where {is_cut}
    order by examined.received_at, examined.email_id, examined.event_key
    limit 1
)
order by received_at desc, email_id desc, event_key desc, provider;

-- name: count_recent_events
-- The newest events of the last day, at most `examined`: their number, and when the oldest of them arrived.
select provider, kind, bounce, count(*)::integer, min(received_at)
from (
    select provider, kind, bounce, received_at
    from dispatcher.email_event
    where received_at > clock_timestamp() - interval '1 day'
        and doubt is distinct from 'impossible'
    order by received_at desc
    limit %(examined)s
) as newest
group by provider, kind, bounce
order by provider, kind, bounce;

-- part: audit_filter
-- The audit records after the cursor that match the filters.
(acted_at, audit_id) < (coalesce(%(after_acted_at)s::timestamptz, 'infinity'), %(after_audit_id)s::bigint)
and acted_at >= coalesce(%(since)s::timestamptz, '-infinity')

-- part: audit_kind
(%(actor)s::text is null or actor = %(actor)s) and (%(action)s::text is null or action = %(action)s)

-- name: list_audit
-- As list_recent_events, for audit records.
with examined as (
    select audit_id, acted_at, actor, action, reason, email_id, replay_id, detail
    from dispatcher.operator_audit
    where {audit_filter}
    order by acted_at desc, audit_id desc
    limit %(examined)s
),
wanted as (
    select *
    from examined
    where {audit_kind}
    order by acted_at desc, audit_id desc
    limit %(limit)s
)
select audit_id, acted_at, actor, action, reason, email_id, replay_id, detail
from wanted
union all
(
    select audit_id, acted_at, null, null, null, null, null, null
    from examined
    where {is_cut}
    order by acted_at, audit_id
    limit 1
)
order by acted_at desc, audit_id desc, actor;

-- name: list_audit_of_email
-- As list_audit, for one email, by the index on the email's id. Reads all records of the email.
select audit_id, acted_at, actor, action, reason, email_id, replay_id, detail
from dispatcher.operator_audit
where email_id = %(email_id)s
    and {audit_filter}
    and {audit_kind}
order by acted_at desc, audit_id desc
limit %(limit)s;
