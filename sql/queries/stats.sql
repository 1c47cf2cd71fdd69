-- Statistics: emails by tenant, lane, provider and tag, per hour and per day (docs/decisions/0089-statistics.md).

-- name: lock_stats
-- Lets one monitor count at a time, until its transaction ends. No row: another monitor counts. A statement of its own,
-- so that the snapshot of count_stats is younger than the lock.
select true
from dispatcher.email_stat_progress
for no key update skip locked;

-- part: stat_columns
is_day, begins_at, tenant_id, lane, provider, tag, sent, failed, suppressed, held, delivered, opened, clicked,
unsubscribed, bounced, bounced_hard, bounced_soft, bounced_blocked, rejected, complained

-- part: stat_totals
sum(sent), sum(failed), sum(suppressed), sum(held), sum(delivered), sum(opened), sum(clicked), sum(unsubscribed),
sum(bounced), sum(bounced_hard), sum(bounced_soft), sum(bounced_blocked), sum(rejected), sum(complained)

-- part: add_to_stats
on conflict (is_day, begins_at, tenant_id, lane, provider, tag) do update
set
    sent = email_stat.sent + excluded.sent,
    failed = email_stat.failed + excluded.failed,
    suppressed = email_stat.suppressed + excluded.suppressed,
    held = email_stat.held + excluded.held,
    delivered = email_stat.delivered + excluded.delivered,
    opened = email_stat.opened + excluded.opened,
    clicked = email_stat.clicked + excluded.clicked,
    unsubscribed = email_stat.unsubscribed + excluded.unsubscribed,
    bounced = email_stat.bounced + excluded.bounced,
    bounced_hard = email_stat.bounced_hard + excluded.bounced_hard,
    bounced_soft = email_stat.bounced_soft + excluded.bounced_soft,
    bounced_blocked = email_stat.bounced_blocked + excluded.bounced_blocked,
    rejected = email_stat.rejected + excluded.rejected,
    complained = email_stat.complained + excluded.complained

-- part: stat_email
-- What is read of an email. An email counts in the hour when it was sent, or became failed or held. A producer may insert
-- any value: an instant that is not of the last weeks counts as now. Until the backfill of delivery states has ended, each
-- email may have events.
e.email_id, left(e.tenant_id, 100) as tenant_id, left(e.lane, 100) as lane, left(coalesce(e.provider, '(none)'), 100) as provider,
case
    when e.status = 'failed' and e.error_type in ('suppressed', 'kept_back') then 'suppressed'
    when e.status in ('sent', 'failed', 'held', 'cancelled') then e.status
    else 'nothing'
end as state,
date_trunc(
    'hour',
    case
        when ended.at > statement_timestamp() - interval '100 days' and ended.at < statement_timestamp() then ended.at
        else statement_timestamp()
    end,
    'UTC'
) as hour,
e.delivery is not null or exists (select from dispatcher.delivery_backfill) as has_events
from dispatcher.email_log as e
cross join lateral (select case when e.status = 'sent' then e.sent_at else e.settled_at end as at) as ended

-- name: count_stats
-- Counts what has changed, and notes how far it came. Needs lock_stats, in the same transaction. Reads:
-- * the next `most` emails by id, without those of the last `late_seconds`, which may not be inserted yet;
-- * the next `most_open` emails that were not sent when they were read;
-- * the next `most` events, by arrival.
-- Rows younger than `stored` may be missing, because a transaction that inserted older rows may still be open.
-- An event counts once per email and kind, in the hour of its email, as soon as the email counts as sent: with the email
-- if it arrived before `events_until`, otherwise when it is read. What has no row and adds no email goes to the row
-- (other), because its row was joined with others (fold_stats).
-- One row: whether more emails or events can be read at once, whether more open emails can be checked, and the hours
-- whose counts changed.
with position as materialized (
    select
        first_id, read_id, checked_id, events_until, next_until, next_xid,
        case
            when next_xid <= pg_snapshot_xmin(pg_current_snapshot()) then greatest(stored_until, next_until)
            else stored_until
        end as stored,
        next_xid is null
        or next_xid <= pg_snapshot_xmin(pg_current_snapshot())
        or next_xid > pg_snapshot_xmax(pg_current_snapshot()) as is_next_over  -- the last: PostgreSQL was restored
    from dispatcher.email_stat_progress
),
bounds as materialized (
    select
        case
            when isfinite(stored)
                then greatest(
                    read_id, dispatcher.email_id_lowest_at(stored - %(late_seconds)s::double precision * interval '1 second')
                )
            else read_id
        end as until_id
    from position
),
-- Only one bound and a limit, so that PostgreSQL reads the index in order and stops.
batch as materialized (
    select
        least(
            (
                select email_id
                from dispatcher.email_log
                where email_id > (select read_id from position)
                order by email_id
                offset %(most)s - 1
                limit 1
            ),
            (select until_id from bounds)
        ) as until_id,
        (
            select received_at
            from dispatcher.email_event
            where received_at > (select events_until from position)
            order by received_at
            offset %(most)s
            limit 1
        ) as cut_at
),
next as materialized (
    select
        cut_at <= stored as is_cut,
        case
            when cut_at <= stored and cut_at - interval '1 microsecond' > events_until then cut_at - interval '1 microsecond'
            when cut_at <= stored then cut_at
            else greatest(events_until, stored)
        end as events_until
    from position
    cross join batch
),
fresh as materialized (
    select {stat_email}
    where e.email_id > (select read_id from position)
        and e.email_id <= (select until_id from batch)
),
again as materialized (
    select email_id
    from dispatcher.email_stat_open
    where email_id > (select checked_id from position)
    order by email_id
    limit %(most_open)s
),
known_ids as materialized (
    select email_id from again
    union
    select email_id
    from dispatcher.email_event
    where received_at > (select events_until from position)
        and received_at <= (select events_until from next)
        and email_id between (select first_id from position) and (select read_id from position)
),
-- Each email, with what it counted as before: null if it was not read before.
email as materialized (
    select f.*, null as was, null::timestamptz as old_hour, null as old_provider, null as old_tag
    from fresh as f
    union all
    select k.*, coalesce(o.counted, k.state), o.hour, o.provider, o.tag
    from known_ids as i
    cross join lateral (select {stat_email} where e.email_id = i.email_id offset 0) as k
    left join dispatcher.email_stat_open as o on o.email_id = k.email_id
),
tagged as materialized (
    select
        e.*,
        coalesce(
            e.old_tag,
            (
                select left(case when not c.tags ? 'one_time_code' then c.tags ->> 0 end, 100)
                from dispatcher.email_content as c
                where c.email_id = e.email_id
            ),
            '(none)'
        ) as tag
    from email as e
    where was is distinct from state or (state = 'sent' and has_events)
),
seen as (
    select v.email_id, w.what, min(v.received_at) as first_at
    from dispatcher.email_event as v
    cross join lateral (values (v.kind), ('bounced_' || v.bounce)) as w (what)
    where v.email_id = any(array(select email_id from tagged where state = 'sent' and has_events))
        and v.email_id >= (select first_id from position)
        and v.doubt is distinct from 'impossible'
        and v.received_at <= (select events_until from next)
    group by v.email_id, w.what
),
change as (
    select hour, tenant_id, lane, provider, tag, state as what, 1 as emails
    from tagged
    where was is distinct from state
    union all
    select old_hour, tenant_id, lane, old_provider, old_tag, was, -1
    from tagged
    where was is distinct from state
        and was is not null
    union all
    select t.hour, t.tenant_id, t.lane, t.provider, t.tag, s.what, 1
    from tagged as t
    join seen as s using (email_id)
    where t.was is distinct from 'sent'
        or s.first_at > (select events_until from position)
),
summed as (
    select
        is_day, case when is_day then date_trunc('day', hour, 'UTC') else hour end as begins_at, tenant_id, lane, provider, tag,
        sum(emails * (what = 'sent')::integer) as sent,
        sum(emails * (what = 'failed')::integer) as failed,
        sum(emails * (what = 'suppressed')::integer) as suppressed,
        sum(emails * (what = 'held')::integer) as held,
        sum(emails * (what = 'delivered')::integer) as delivered,
        sum(emails * (what = 'opened')::integer) as opened,
        sum(emails * (what = 'clicked')::integer) as clicked,
        sum(emails * (what = 'unsubscribed')::integer) as unsubscribed,
        sum(emails * (what = 'bounced')::integer) as bounced,
        sum(emails * (what = 'bounced_hard')::integer) as bounced_hard,
        sum(emails * (what = 'bounced_soft')::integer) as bounced_soft,
        sum(emails * (what = 'bounced_blocked')::integer) as bounced_blocked,
        sum(emails * (what = 'rejected')::integer) as rejected,
        sum(emails * (what = 'complained')::integer) as complained
    from change
    cross join (values (false), (true)) as span (is_day)
    where what not in ('nothing', 'cancelled', 'accepted', 'deferred')
    group by is_day, begins_at, tenant_id, lane, provider, tag
),
-- 0: its row; 1: the row of its tenant's joined tags; 2: the row of all joined tenants.
placed as (
    select
        s.*,
        case
            when sent + failed + suppressed + held > 0 then 0
            else coalesce(
                (
                    select min(case when k.tag = s.tag then 0 else 1 end)
                    from dispatcher.email_stat as k
                    where (k.is_day, k.begins_at, k.tenant_id) = (s.is_day, s.begins_at, s.tenant_id)
                        and (k.lane, k.provider) = (s.lane, s.provider)
                        and k.tag in (s.tag, '(other)')
                ),
                2
            )
        end as place
    from summed as s
),
counted as (
    insert into dispatcher.email_stat ({stat_columns})
    select
        is_day, begins_at, case when place < 2 then tenant_id else '(other)' end, lane, provider,
        case when place < 1 then tag else '(other)' end, {stat_totals}
    from placed
    group by 1, 2, 3, 4, 5, 6
    {add_to_stats}
    returning is_day, begins_at
),
opened as (
    insert into dispatcher.email_stat_open (email_id, counted, hour, provider, tag)
    select email_id, state, hour, provider, tag
    from tagged
    where state <> 'sent'
        and was is distinct from state
    on conflict (email_id) do update
    set counted = excluded.counted, hour = excluded.hour, provider = excluded.provider
),
closed as (
    delete from dispatcher.email_stat_open
    where email_id = any(
        array(
            select email_id from known_ids
            except
            select email_id from email where state <> 'sent'
        )
    )
),
moved as (
    update dispatcher.email_stat_progress as p
    set
        read_id = (select until_id from batch),
        checked_id = case
            when (select count(*) from again) = %(most_open)s
                then (select email_id from again order by email_id desc limit 1)
            else '00000000-0000-0000-0000-000000000000'
        end,
        events_until = (select events_until from next),
        stored_until = o.stored,
        next_until = case when o.is_next_over then statement_timestamp() - interval '1 second' else o.next_until end,
        next_xid = case when o.is_next_over then pg_current_xact_id() else o.next_xid end
    from position as o
)
select
    (select until_id from batch) < (select until_id from bounds) or (select is_cut from next) is true,
    (select count(*) from again) = %(most_open)s,
    array(select distinct begins_at from counted where not is_day);

-- name: fold_stats
-- Joins the smallest rows of each given hour, and of its day, that has more than `most` rows: the `keep` largest rows
-- stay. Joins the tags of a tenant, or with `tenants` all tenants of a lane and a provider. No rows.
with crowded as (
    select is_day, begins_at
    from dispatcher.email_stat
    where (not is_day and begins_at = any(%(hours)s::timestamptz[]))
        or (
            is_day
            and begins_at = any(
                array(select date_trunc('day', hour, 'UTC') from unnest(%(hours)s::timestamptz[]) as given (hour))
            )
        )
    group by is_day, begins_at
    having count(*) > %(most)s::bigint
),
ranked as (
    select
        is_day, begins_at, tenant_id, lane, provider, tag,
        row_number() over (partition by is_day, begins_at order by sent + failed + suppressed + held desc) as place
    from dispatcher.email_stat
    join crowded using (is_day, begins_at)
    where case when %(tenants)s::boolean then tenant_id else tag end <> '(other)'
),
folded as (
    delete from dispatcher.email_stat as s
    using ranked as r
    where r.place > %(keep)s::bigint
        and (s.is_day, s.begins_at, s.tenant_id, s.lane, s.provider, s.tag)
        = (r.is_day, r.begins_at, r.tenant_id, r.lane, r.provider, r.tag)
    returning s.*
)
insert into dispatcher.email_stat ({stat_columns})
select
    is_day, begins_at, case when %(tenants)s::boolean then '(other)' else tenant_id end, lane, provider, '(other)',
    {stat_totals}
from folded
group by 1, 2, 3, 4, 5
{add_to_stats};

-- name: delete_stats
-- Deletes up to `limit` rows of hours that ended 35 days ago, or of days that ended 400 days ago. Returns a row per row.
with old as (
    select ctid
    from dispatcher.email_stat
    where (not is_day and begins_at < statement_timestamp() - interval '35 days')
        or (is_day and begins_at < statement_timestamp() - interval '400 days')
    limit %(limit)s
)
delete from dispatcher.email_stat
where ctid = any(array(select ctid from old))
returning begins_at;

-- part: stat_sums
sum(sent)::bigint as sent, sum(failed)::bigint as failed,
round(100.0 * sum(failed) / nullif(sum(sent) + sum(failed), 0), 3)::double precision as failed_percent,
sum(bounced)::bigint as bounced,
round(100.0 * sum(bounced) / nullif(sum(sent), 0), 3)::double precision as bounced_percent,
sum(complained)::bigint as complained,
round(100.0 * sum(complained) / nullif(sum(sent), 0), 3)::double precision as complained_percent

-- part: stats_between
-- The rows of the hours in `bounds`: whole days as days, the hours around them as hours.
(
    select *
    from dispatcher.email_stat
    where is_day
        and begins_at >= (select first_day from bounds)
        and begins_at < (select last_day from bounds)
    union all
    select *
    from dispatcher.email_stat
    where not is_day
        and begins_at >= (select first_hour from bounds)
        and begins_at < (select least(first_day, until_at) from bounds)
    union all
    select *
    from dispatcher.email_stat
    where not is_day
        and begins_at >= (select greatest(first_day, last_day) from bounds)
        and begins_at < (select until_at from bounds)
) as s

-- name: list_stats
-- The counts of a period, grouped by one column. The first hour counts whole, and so does the first day if it is older
-- than the hours (delete_stats). Times in order, other names by the number of sent emails; at most 1,000.
with bounds as materialized (
    select
        g.since as first_hour, g.until_at,
        case
            when %(per)s::text = 'hour' then g.until_at
            else date_trunc('day', g.since + interval '1 day' - interval '1 microsecond', 'UTC')
        end as first_day,
        case when %(per)s::text = 'hour' then g.until_at else date_trunc('day', g.until_at, 'UTC') end as last_day
    from (
        select
            date_trunc(
                case when %(since)s::timestamptz < statement_timestamp() - interval '34 days' then 'day' else 'hour' end,
                %(since)s::timestamptz, 'UTC'
            ) as since,
            %(until)s::timestamptz as until_at
    ) as g
)
select
    case %(per)s::text
        when 'tenant' then tenant_id
        when 'lane' then lane
        when 'provider' then provider
        when 'tag' then tag
        when 'day' then to_char(begins_at at time zone 'UTC', 'YYYY-MM-DD')
        else to_char(begins_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI"Z"')
    end as name,
    {stat_sums}, sum(held)::bigint as held, sum(suppressed)::bigint as suppressed,
    sum(delivered)::bigint as delivered, sum(opened)::bigint as opened,
    sum(clicked)::bigint as clicked, sum(unsubscribed)::bigint as unsubscribed,
    sum(bounced_hard)::bigint as bounced_hard, sum(bounced_soft)::bigint as bounced_soft,
    sum(bounced_blocked)::bigint as bounced_blocked, sum(rejected)::bigint as rejected
from {stats_between}
where (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s)
    and (%(lane)s::text is null or lane = %(lane)s)
    and (%(provider)s::text is null or provider = %(provider)s)
    and (%(tag)s::text is null or tag = %(tag)s)
group by name
order by case when %(per)s::text in ('day', 'hour') then min(begins_at) end, sum(sent) desc, name
limit 1000;

-- name: split_stats
-- The sent emails of each hour, or of each day, by a tenant, a lane or a provider.
select
    begins_at,
    case %(split)s::text when 'tenant' then tenant_id when 'lane' then lane else provider end as name,
    sum(sent)::bigint as sent
from dispatcher.email_stat
where is_day = %(is_day)s
    and begins_at >= %(since)s
    and (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s)
group by begins_at, name;

-- name: list_tenants
-- Tenants that sent an email in the last seven days, and tenants for which something is set: what is set, and their counts
-- of the current hour and the 23 hours before, and of today (UTC) and the six days before. The largest first; at most
-- 1,000. Limits as in list_tenant_limits.
with hours as (
    select tenant_id, {stat_sums}
    from dispatcher.email_stat
    where not is_day
        and begins_at > statement_timestamp() - interval '24 hours'
    group by tenant_id
),
days as (
    select tenant_id, {stat_sums}
    from dispatcher.email_stat
    where is_day
        and begins_at > statement_timestamp() - interval '7 days'
    group by tenant_id
)
select
    tenant_id,
    case when t.weight between 0.001 and 1000000 then t.weight else 1 end as weight,
    case when t.per_second not between 0.001 and 1000000 then 0.001 else t.per_second end as per_second,
    coalesce(h.sent, 0) as sent_24h, h.failed_percent as failed_percent_24h, h.bounced_percent as bounced_percent_24h,
    h.complained_percent as complained_percent_24h, coalesce(d.sent, 0) as sent_7d, d.failed_percent as failed_percent_7d,
    d.bounced_percent as bounced_percent_7d, d.complained_percent as complained_percent_7d
from dispatcher.tenant_limit as t
full join days as d using (tenant_id)
left join hours as h using (tenant_id)
order by coalesce(d.sent, 0) desc, tenant_id
limit 1000;
