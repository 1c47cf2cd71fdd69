-- part: lag_seconds
-- The age of the oldest event of the feed after the cursor of the webhook w; null if there is none.
(
    select extract(epoch from clock_timestamp() - e.created_at)::double precision
    from dispatcher.outgoing_event as e
    where (e.made_in, e.position) > (w.made_in, w.position)
    order by e.made_in, e.position
    limit 1
)

-- part: webhook_columns
-- The first columns of the dataclass Webhook. `w` is the webhook.
w.webhook_id as id, w.url, w.tenant_id, array(select 'email.' || kind from unnest(w.kinds) as kind) as events,
w.with_recipients as recipients, w.state, w.failing_since,
nullif(w.next_attempt_at, 'epoch') as next_attempt_at, w.last_error, w.delivered_at, w.created_at

-- part: refused_events
-- How many refused events of the webhook w wait for a retry, and how many were given up.
(select count(*) from dispatcher.webhook_retry as r where r.webhook_id = w.webhook_id and r.due_at is not null) as retries,
(select count(*) from dispatcher.webhook_retry as r where r.webhook_id = w.webhook_id and r.due_at is null) as given_up

-- part: wanted_webhook
-- A webhook by its id; only of a tenant, or of any (null).
webhook_id = %(webhook_id)s and (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s)

-- part: audited_webhook
-- Audits a change of the webhook in `changed`.
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select %(actor)s, %(act)s, %(reason)s, jsonb_build_object('webhook', webhook_id)
    from changed
)

-- name: insert_webhook
-- The webhook gets all events from now on. No row: the tenant already has most_webhooks webhooks, or one with this URL.
-- Both also apply to the webhooks for all tenants (null), as if they belonged to one more tenant.
with wanted as (
    update dispatcher.outgoing_feed
    set is_on = true, wanted_at = clock_timestamp()
),
changed as (
    insert into dispatcher.webhook (url, tenant_id, kinds, with_recipients, secret)
    select %(url)s, %(tenant_id)s, %(kinds)s, %(recipients)s, %(secret)s
    where (
        select count(*) < %(most_webhooks)s and count(*) filter (where url = %(url)s) = 0
        from dispatcher.webhook
        where tenant_id is not distinct from %(tenant_id)s
    )
    returning *
),
{audited_webhook}
select {webhook_columns}, {lag_seconds} as lag_seconds, {refused_events}, w.secret
from changed as w;

-- name: list_webhooks
-- The webhooks of a tenant, or all webhooks (null), oldest first; or one webhook.
select {webhook_columns}, {lag_seconds} as lag_seconds, {refused_events}
from dispatcher.webhook as w
where (%(webhook_id)s::bigint is null or w.webhook_id = %(webhook_id)s)
    and (%(tenant_id)s::text is null or w.tenant_id = %(tenant_id)s)
order by w.webhook_id;

-- name: list_refused
-- A page of the events that the receiver of a webhook refused and has not accepted since, newest first.
select
    r.failed_at, 'email.' || e.kind as type, e.email_id, e.message_key, r.last_error as error, r.due_at, r.event_id as id
from dispatcher.webhook as w
join dispatcher.webhook_retry as r using (webhook_id)
join dispatcher.outgoing_event as e using (event_id)
where w.webhook_id = %(webhook_id)s
    and (%(tenant_id)s::text is null or w.tenant_id = %(tenant_id)s)
    and (%(after_failed_at)s::timestamptz is null or (r.failed_at, r.event_id) < (%(after_failed_at)s, %(after_id)s::uuid))
order by r.failed_at desc, r.event_id desc
limit %(limit)s;

-- name: set_webhook
-- Null: the URL, or the kinds, stay. No row: the webhook does not exist, or another one of its tenant has the URL.
with changed as (
    update dispatcher.webhook as w
    set
        url = coalesce(%(url)s, w.url),
        kinds = coalesce(%(kinds)s::text[], w.kinds),
        next_attempt_at = 'epoch',
        revision = revision + 1
    where {wanted_webhook}
        and not exists (
            select
            from dispatcher.webhook as o
            where o.webhook_id <> w.webhook_id
                and o.tenant_id is not distinct from w.tenant_id
                and o.url = %(url)s
        )
    returning *
),
{audited_webhook}
select {webhook_columns}, {lag_seconds} as lag_seconds, {refused_events}
from changed as w;

-- name: find_webhook_target
-- The URL and the secrets of a webhook, newest secret first; used to post a test event.
select
    webhook_id as id, url,
    array_remove(array[secret, case when previous_until > clock_timestamp() then previous_secret end], null) as secrets
from dispatcher.webhook
where {wanted_webhook};

-- name: delete_webhook
-- No row: the webhook does not exist.
with changed as (
    delete from dispatcher.webhook
    where {wanted_webhook}
    returning *
),
{audited_webhook}
select {webhook_columns}, {lag_seconds} as lag_seconds, {refused_events}
from changed as w;

-- name: rotate_webhook
-- For `hours`, deliveries are also signed with the previous secret. No row: the webhook does not exist.
with changed as (
    update dispatcher.webhook
    set
        secret = %(secret)s,
        previous_secret = secret,
        previous_until = clock_timestamp() + %(hours)s * interval '1 hour',
        revision = revision + 1
    where {wanted_webhook}
    returning *
),
{audited_webhook}
select {webhook_columns}, {lag_seconds} as lag_seconds, {refused_events}, w.secret
from changed as w;

-- name: enable_webhook
-- Refused events that wait for a retry or were given up become due now. No row: the webhook does not exist.
with changed as (
    update dispatcher.webhook
    set state = 'active', failing_since = null, next_attempt_at = 'epoch', last_error = null, revision = revision + 1
    where {wanted_webhook}
    returning *
),
due as (
    update dispatcher.webhook_retry
    set failed_at = clock_timestamp(), due_at = clock_timestamp()
    where webhook_id in (select webhook_id from changed)
    returning event_id
),
{audited_webhook}
select {webhook_columns}, {lag_seconds} as lag_seconds, (select count(*) from due) as retries, 0::bigint as given_up
from changed as w;

-- name: disable_webhook
-- Stops the deliveries to a webhook, which keeps its cursor. No row: the webhook does not exist.
with changed as (
    update dispatcher.webhook
    set state = 'disabled', failing_since = null, last_error = %(error)s, revision = revision + 1
    where {wanted_webhook}
    returning *
),
{audited_webhook}
select {webhook_columns}, {lag_seconds} as lag_seconds, {refused_events}
from changed as w;

-- name: rewind_webhook
-- Delivers the events since an instant again. Never moves the cursor forward. No row: the webhook does not exist.
with begin as (
    select min(made_in::text::bigint)::text::xid8 as made_in
    from dispatcher.outgoing_event
    where event_id >= dispatcher.email_id_lowest_at(%(since)s)
),
changed as (
    update dispatcher.webhook as w
    set
        made_in = case when b.made_in <= w.made_in then b.made_in else w.made_in end,
        position = case when b.made_in <= w.made_in then 0 else w.position end,
        next_attempt_at = 'epoch',
        revision = w.revision + 1
    from begin as b
    where {wanted_webhook}
    returning w.*
),
forgotten as (
    delete from dispatcher.webhook_retry
    where webhook_id in (select webhook_id from changed)
        and event_id >= dispatcher.email_id_lowest_at(%(since)s)
),
{audited_webhook}
select {webhook_columns}, {lag_seconds} as lag_seconds, r.retries, r.given_up
from changed as w
cross join lateral (
    select count(*) filter (where due_at is not null) as retries, count(*) filter (where due_at is null) as given_up
    from dispatcher.webhook_retry
    where webhook_id = w.webhook_id
        and event_id < dispatcher.email_id_lowest_at(%(since)s)
) as r;

-- name: find_due_webhooks
-- Active webhooks that have events to deliver, with the number of refused events that wait, up to most_retries.
select
    w.webhook_id, w.url, w.tenant_id, w.kinds, w.with_recipients,
    array_remove(array[w.secret, case when w.previous_until > clock_timestamp() then w.previous_secret end], null),
    w.made_in::text::bigint, w.position, w.revision, w.failing_since, w.delivered_at,
    (
        select count(*)
        from (
            select
            from dispatcher.webhook_retry as r
            where r.webhook_id = w.webhook_id
                and r.due_at is not null
            limit %(most_retries)s
        ) as waiting
    )
from dispatcher.webhook as w
where w.state = 'active'
    and w.next_attempt_at <= %(now)s
    and w.webhook_id <> all(%(busy)s::bigint[])
    and (
        exists (
            select
            from dispatcher.outgoing_event as e
            where (e.made_in, e.position) > (w.made_in, w.position)
                and e.made_in < pg_snapshot_xmin(pg_current_snapshot())
        )
        or exists (
            select
            from dispatcher.webhook_retry as r
            where r.webhook_id = w.webhook_id
                and r.due_at <= %(now)s
        )
    )
order by w.webhook_id;

-- name: find_due_retries
-- Refused events of a webhook whose next attempt is due, the longest due first, with the columns of read_feed.
select
    r.failed_at, e.event_id, e.kind, e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.reason, e.provider,
    e.code, e.bounce, e.address_hash, e.happened_at, e.created_at,
    (select c.metadata from dispatcher.email_content as c where c.email_id = e.email_id),
    (
        select l.topic
        from dispatcher.email_log as l
        where e.kind = 'unsubscribed' and e.code = 'group' and l.email_id = e.email_id
    )
from dispatcher.webhook_retry as r
join dispatcher.outgoing_event as e using (event_id)
where r.webhook_id = %(webhook_id)s
    and r.due_at <= %(now)s
order by r.due_at
limit %(limit)s;

-- name: save_deliveries
-- No row: an operator changed or removed the webhook during the round. In this case, nothing is saved, and the next
-- round delivers the same events again.
with changed as (
    update dispatcher.webhook
    set
        made_in = %(made_in)s::text::xid8,
        position = %(position)s,
        failing_since = %(failing_since)s,
        next_attempt_at = %(next_attempt_at)s,
        last_error = %(last_error)s,
        delivered_at = %(delivered_at)s,
        state = %(state)s
    where webhook_id = %(webhook_id)s
        and revision = %(revision)s
        and state = 'active'
    returning webhook_id
),
delivered as (
    delete from dispatcher.webhook_retry
    where webhook_id = (select webhook_id from changed)
        and event_id = any(%(delivered_ids)s::uuid[])
),
refused as (
    insert into dispatcher.webhook_retry (webhook_id, event_id, failed_at, due_at, last_error)
    select c.webhook_id, t.event_id, t.failed_at, t.due_at, t.error
    from changed as c
    cross join unnest(
        %(refused_ids)s::uuid[], %(failed_ats)s::timestamptz[], %(due_ats)s::timestamptz[], %(errors)s::text[]
    ) as t (event_id, failed_at, due_at, error)
    on conflict (webhook_id, event_id) do update
    set due_at = excluded.due_at, last_error = excluded.last_error
)
select webhook_id
from changed;

-- name: restore_feed
-- If an event of the feed, or the cursor of a webhook, contains a transaction id that this server has not reached yet,
-- the rows come from a dump of another server. Readers would not get such an event until this server has reached the id.
-- So these events move before all events of this server, and the cursors before the events that were not delivered. No
-- row: nothing was restored.
with restored as (
    select true as is_restored
    from (select pg_snapshot_xmax(pg_current_snapshot()) as next) as s
    where exists (select from dispatcher.outgoing_event as e where e.made_in >= s.next)
        or exists (select from dispatcher.webhook as w where w.made_in > s.next)
),
moved as (
    update dispatcher.outgoing_event
    set made_in = '0'
    where made_in >= pg_snapshot_xmax(pg_current_snapshot())
),
begun as (
    update dispatcher.webhook as w
    set
        made_in = '0',
        position = coalesce(
            (
                select min(e.position) - 1
                from dispatcher.outgoing_event as e
                where (e.made_in, e.position) > (w.made_in, w.position)
            ),
            w.position
        ),
        revision = w.revision + 1
    where exists (select from restored)
)
select is_restored
from restored;

-- name: check_webhooks
-- The state of each webhook: active; or disabled by an operator, or because its receiver failed for too long or answered
-- 410 (gone).
select w.webhook_id, w.tenant_id, w.state, w.last_error, {lag_seconds}
from dispatcher.webhook as w
order by w.webhook_id;
