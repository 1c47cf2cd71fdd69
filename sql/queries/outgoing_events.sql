-- name: read_feed
-- Events after a cursor, in the order of the feed: of the `limit` events that are read, the wanted ones, and the last
-- one, wanted or not. Stops before the events of the oldest transaction that is still open, because this transaction
-- may still commit events, which come before all events of later transactions.
select
    made_in::text::bigint, position, is_wanted, total, event_id, kind, email_id, tenant_id, message_key, correlation_id,
    reason, provider, code, bounce, address_hash, happened_at, created_at,
    (select c.metadata from dispatcher.email_content as c where is_wanted and c.email_id = numbered.email_id),
    (
        select l.topic
        from dispatcher.email_log as l
        where is_wanted and numbered.kind = 'unsubscribed' and numbered.code = 'group' and l.email_id = numbered.email_id
    )
from (
    select
        slice.*, kind = any(%(kinds)s::text[]) and (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s) as is_wanted,
        count(*) over () as total,
        row_number() over (order by made_in, position) as number
    from (
        select *
        from dispatcher.outgoing_event
        where (made_in, position) > (%(made_in)s::text::xid8, %(position)s::bigint)
            and made_in < pg_snapshot_xmin(pg_current_snapshot())
        order by made_in, position
        limit %(limit)s
    ) as slice
) as numbered
where is_wanted
    or number = total
order by made_in, position;

-- name: want_feed
-- An application polls, so statements write events from now on. Changes the row at most once an hour.
update dispatcher.outgoing_feed
set is_on = true, wanted_at = clock_timestamp()
where not is_on
    or wanted_at < clock_timestamp() - interval '1 hour'
returning is_on;

-- name: find_timeline
-- Cursors of another timeline, or of a transaction after the next one, are from before a restore or a promotion.
select
    ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer,
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- name: find_feed_since
-- The transaction id from which the feed must be read to get every event since an instant. Null: there is none.
select min(made_in::text::bigint)
from dispatcher.outgoing_event
where event_id >= dispatcher.email_id_lowest_at(%(since)s);

-- name: delete_outgoing_events
-- Deletes up to `limit` events older than `days`, and the retries of these events. Returns a row per event.
with old as (
    select event_id
    from dispatcher.outgoing_event
    where event_id < dispatcher.email_id_lowest_at(statement_timestamp() - %(days)s * interval '1 day')
    order by event_id
    limit %(limit)s
),
retries as (
    delete from dispatcher.webhook_retry
    where event_id in (select event_id from old)
)
delete from dispatcher.outgoing_event
where event_id = any(array(select event_id from old))
returning event_id;

-- name: stop_unwanted_feed
-- Turns the feed off if there is no webhook and no application has polled for `days`. If a webhook is added at the same
-- time and this statement waits for it, wanted_at has changed, and the feed stays on.
update dispatcher.outgoing_feed
set is_on = false
where is_on
    and wanted_at < clock_timestamp() - %(days)s * interval '1 day'
    and not exists (select from dispatcher.webhook)
returning is_on;
