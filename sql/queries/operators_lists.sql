-- name: list_recent_events
-- A page of what providers reported, newest first, starting below a given event; for one tenant, or for all tenants
-- (null). Reads at most `examined` events, whatever the filters, so each page takes about the same time. The last three
-- columns identify the event below which the next page starts; null: this is the last page. These columns are returned
-- even if no event matches.
with examined as (
    select received_at, email_id, event_key, happened_at, provider, kind, bounce, code, detail, doubt
    from dispatcher.email_event
    where (received_at, email_id, event_key) < (%(at)s::timestamptz, %(email_id)s::uuid, %(event_key)s::bytea)
        and received_at >= %(since)s::timestamptz
    order by received_at desc, email_id desc, event_key desc
    limit %(examined)s
),
wanted as (
    select x.*, e.tenant_id, e.message_key
    from examined as x
    join dispatcher.email_log as e on e.email_id = x.email_id
    where (%(provider)s::text is null or x.provider = %(provider)s)
        and (%(kind)s::text is null or x.kind = %(kind)s)
        and (%(tenant_id)s::text is null or e.tenant_id = %(tenant_id)s)
    order by x.received_at desc, x.email_id desc, x.event_key desc
    limit %(limit)s
)
select
    w.received_at, w.email_id, w.event_key, w.happened_at, w.provider, w.kind, w.bounce, w.code, w.detail, w.doubt,
    w.tenant_id, w.message_key, bound.received_at, bound.email_id, bound.event_key
from (values (true)) as always
left join lateral (
    select received_at, email_id, event_key
    from examined
    where (select count(*) from examined) = %(examined)s
    order by received_at, email_id, event_key
    limit 1
) as bound on true
left join wanted as w on true
order by w.received_at desc, w.email_id desc, w.event_key desc;

-- name: count_recent_events
-- The newest events of the last day, at most `examined`, by provider, kind and bounce: their number, and when the
-- oldest of them arrived.
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

-- name: list_audit
-- A page of audit records, newest first, starting below a given record. Reads at most `examined` records, whatever the
-- filters. The last two columns identify the record below which the next page starts; null: this is the last page.
-- These columns are returned even if no record matches.
with examined as (
    select audit_id, acted_at, actor, action, reason, email_id, replay_id, detail
    from dispatcher.operator_audit
    where (acted_at, audit_id) < (%(at)s::timestamptz, %(audit_id)s::bigint)
        and acted_at >= %(since)s::timestamptz
    order by acted_at desc, audit_id desc
    limit %(examined)s
),
wanted as (
    select *
    from examined
    where (%(actor)s::text is null or actor = %(actor)s)
        and (%(action)s::text is null or action = %(action)s)
    order by acted_at desc, audit_id desc
    limit %(limit)s
)
select
    w.audit_id, w.acted_at, w.actor, w.action, w.reason, w.email_id, w.replay_id, w.detail, bound.acted_at,
    bound.audit_id
from (values (true)) as always
left join lateral (
    select acted_at, audit_id
    from examined
    where (select count(*) from examined) = %(examined)s
    order by acted_at, audit_id
    limit 1
) as bound on true
left join wanted as w on true
order by w.acted_at desc, w.audit_id desc;

-- name: list_audit_of_email
-- As list_audit, for one email, by the index on the email's id. The last two columns are always null.
select
    audit_id, acted_at, actor, action, reason, email_id, replay_id, detail, null::timestamptz, null::bigint
from dispatcher.operator_audit
where email_id = %(of_email_id)s
    and (acted_at, audit_id) < (%(at)s::timestamptz, %(audit_id)s::bigint)
    and acted_at >= %(since)s::timestamptz
    and (%(actor)s::text is null or actor = %(actor)s)
    and (%(action)s::text is null or action = %(action)s)
order by acted_at desc, audit_id desc
limit %(limit)s;
