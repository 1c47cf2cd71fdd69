-- part: made_pending
-- Makes failed and held emails pending and due; only their later attempts count towards the maximum. This is the only way
-- in which an operator sends an email again. The statement names the emails in `item`: whether only a held email may be
-- sent again, whether an email that may have arrived may be, and from when on a discarded dead letter prevents it.
-- `judged` has an outcome per email: `replayed`, or why nothing changed; null: another transaction has locked the row.
-- The update has no condition on the status: it would apply to the row as it was when the statement began, and leave out an
-- email that became held while the statement waited for its lock. `candidate` has locked the current row.
candidate as (
    select
        e.email_id,
        e.status,
        e.dead_letter_discarded_at,
        e.expires_at <= clock_timestamp() as is_expired,
        e.status = 'held' or e.was_uncertain as may_have_arrived,
        e.email_id in (
            select c.email_id from dispatcher.email_content as c where c.email_id = any(array(select email_id from item))
        ) as has_content
    from dispatcher.email_log as e
    where e.email_id = any(array(select email_id from item))
    for update of e skip locked
),
judged as (
    select
        i.email_id,
        case
            when s.email_id is null and exists (
                select from dispatcher.email_log as e where e.email_id = any(array[i.email_id])
            ) then null
            when s.email_id is null then 'unknown'
            when s.status = 'sent' then 'already_sent'
            when s.status in ('pending', 'waiting', 'sending') then 'under_way'
            when s.status = 'cancelled' then 'cancelled'
            when s.status = 'failed' and i.is_of_held then 'failed'
            when s.is_expired then 'expired'
            when s.dead_letter_discarded_at >= i.heeds_discards_from then 'discarded'
            when s.may_have_arrived and not i.include_held then 'may_have_arrived'
            when not s.has_content then 'content_pruned'
            else 'replayed'
        end as outcome
    from item as i
    left join candidate as s using (email_id)
),
made_pending as (
    update dispatcher.email_log as e
    set
        status = 'pending',
        attempt_base = e.attempt_count,
        due_since = clock_timestamp(),
        redelivery_count = 0,
        crash_count = 0,
        pinned_at = null,
        locked_by = null,
        locked_until = 'epoch',
        published_at = null,
        publish_due_at = clock_timestamp(),
        dead_letter_due_at = null,
        dead_letter_discarded_at = null,
        delivery = case when e.error_type is distinct from 'dropped_by_provider' then e.delivery end
    where e.email_id = any(array(select email_id from judged where outcome = 'replayed'))
    returning
        e.email_id,
        e.attempt_count,
        case when not exists (select from dispatcher.relay_polls) then pg_notify('email_dispatcher_due', '') end
)

-- name: create_replay
-- Creates a replay with its list of emails, and audits this. Returns the replay's id. Changes no email, except if the list
-- has only one: it is replayed in the same commit (see made_pending), and the replay is done. If another transaction has
-- locked its row, the replay is running.
with item as (
    select
        t.email_id,
        false as is_of_held,
        %(include_held)s::boolean as include_held,
        case
            when %(source)s = 'ids' or %(selection)s::jsonb ? 'discarded' then 'infinity'::timestamptz
            else '-infinity'
        end as heeds_discards_from
    from unnest(%(email_ids)s::uuid[]) as t (email_id)
    where cardinality(%(email_ids)s::uuid[]) = 1
),
{made_pending},
made as (
    insert into dispatcher.email_replay (
        source, selection, include_held, per_second, actor, reason, paced_with, state
    )
    values (
        %(source)s, %(selection)s::jsonb, %(include_held)s, %(per_second)s, %(actor)s, %(reason)s,
        case when not %(force)s then array[]::bigint[] end,
        case when exists (select from judged where outcome is not null) then 'done' else 'running' end
    )
    returning replay_id
),
listed as (
    insert into dispatcher.email_replay_item (replay_id, email_id, outcome, settled_at)
    select m.replay_id, t.email_id, j.outcome, case when j.outcome is not null then clock_timestamp() end
    from made as m
    cross join unnest(%(email_ids)s::uuid[]) as t (email_id)
    left join judged as j using (email_id)
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, replay_id, detail)
    select
        %(actor)s, 'replay', %(reason)s, replay_id,
        %(selection)s::jsonb || case when %(force)s then jsonb_build_object('force', true) else jsonb_build_object() end
    from made
)
select replay_id
from made;

-- name: replay_next
-- Replays the next email of a running replay, after a given id, and stores its outcome in the same commit (see
-- made_pending). If another transaction has locked the email's row (for example a second replay of the same email),
-- nothing changes: the outcome is null, and the email still waits. An email whose dead letter was discarded is skipped,
-- with one exception: it is replayed if it was discarded before the replay was created, and the replay is for given ids or
-- for discarded emails. Zero rows: no email is left, or the replay is not running.
with item as (
    select
        i.email_id,
        false as is_of_held,
        r.include_held,
        case
            when r.source = 'ids' or r.selection ? 'discarded' then r.created_at
            else '-infinity'
        end as heeds_discards_from
    from dispatcher.email_replay as r
    join dispatcher.email_replay_item as i using (replay_id)
    where r.replay_id = %(replay_id)s
        and r.state = 'running'
        and i.outcome is null
        and (%(after)s::uuid is null or i.email_id > %(after)s)
    order by i.email_id
    limit 1
    for update of i skip locked
),
{made_pending},
settled as (
    update dispatcher.email_replay_item as i
    set outcome = j.outcome, settled_at = clock_timestamp()
    from judged as j
    where i.replay_id = %(replay_id)s
        and i.email_id = j.email_id
        and j.outcome is not null
)
select email_id, outcome
from judged;

-- name: has_running_replay
-- A row: at least one replay is running.
select replay_id
from dispatcher.email_replay
where state = 'running'
limit 1;

-- name: find_overlaps
-- Other running replays in which some of the given emails still wait, or of those that still wait in the given replay.
with wanted as (
    select email_id
    from unnest(%(email_ids)s::uuid[]) as t (email_id)
    union all
    select email_id
    from dispatcher.email_replay_item
    where replay_id = %(replay_id)s
        and outcome is null
)
select r.replay_id as id, r.actor, r.reason, r.per_second, count(*) as emails
from dispatcher.email_replay as r
join dispatcher.email_replay_item as i using (replay_id)
join wanted as w using (email_id)
where r.state = 'running'
    and r.replay_id is distinct from %(replay_id)s
    and i.outcome is null
group by r.replay_id
order by r.replay_id;

-- name: save_overlaps
-- Stores the running replays that include some emails of this replay, and share its rate. Changes nothing if this replay
-- was created with `force`, and keeps its own rate.
update dispatcher.email_replay as mine
set paced_with = array(
    select distinct r.replay_id
    from dispatcher.email_replay_item as own
    join dispatcher.email_replay_item as i using (email_id)
    join dispatcher.email_replay as r on r.replay_id = i.replay_id
    where own.replay_id = %(replay_id)s
        and own.outcome is null
        and i.outcome is null
        and i.replay_id <> own.replay_id
        and r.state = 'running'
    order by r.replay_id
)
where mine.replay_id = %(replay_id)s
    and mine.paced_with is not null
    and mine.state = 'running';

-- name: find_pace
-- The emails per second that a replay may send now: its share of the lowest rate among the overlapping replays that
-- are running. Null: no limit.
select min(r.per_second) / count(*)
from dispatcher.email_replay as mine
join dispatcher.email_replay as r
    on r.replay_id = mine.replay_id
    or (
        r.state = 'running'
        and (r.replay_id = any(mine.paced_with) or mine.replay_id = any(r.paced_with))
        and mine.paced_with is not null
        and r.paced_with is not null
        and dispatcher.named_lock_holder('replay ' || r.replay_id) is not null
    )
where mine.replay_id = %(replay_id)s;

-- name: has_emails_left
-- A row: the replay is running and has emails left.
select r.replay_id
from dispatcher.email_replay as r
where r.replay_id = %(replay_id)s
    and r.state = 'running'
    and exists (
        select from dispatcher.email_replay_item as i where i.replay_id = r.replay_id and i.outcome is null
    );

-- name: finish_replay
-- Marks a replay as done if no email is left. Zero rows: emails are left, or the replay is not running.
update dispatcher.email_replay as r
set state = 'done', changed_at = clock_timestamp()
where r.replay_id = %(replay_id)s
    and r.state = 'running'
    and not exists (
        select from dispatcher.email_replay_item as i where i.replay_id = %(replay_id)s and i.outcome is null
    )
returning r.replay_id;

-- name: stop_replay
-- Stops a replay, and audits this. Zero rows: the replay is not running.
with stopped as (
    update dispatcher.email_replay
    set state = 'stopped', changed_at = clock_timestamp()
    where replay_id = %(replay_id)s
        and state = 'running'
    returning replay_id
)
insert into dispatcher.operator_audit (actor, action, reason, replay_id)
select %(actor)s, 'stop', %(reason)s, replay_id
from stopped
returning replay_id;

-- name: resume_replay
-- Resumes a stopped or interrupted replay, with a new rate if given. Zero rows: the replay is done or unknown.
with resumed as (
    update dispatcher.email_replay
    set
        state = 'running',
        per_second = coalesce(%(per_second)s, per_second),
        paced_with = case when not %(force)s then array[]::bigint[] end,
        changed_at = clock_timestamp()
    where replay_id = %(replay_id)s
        and state in ('running', 'stopped')
    returning replay_id
)
insert into dispatcher.operator_audit (actor, action, reason, replay_id, detail)
select %(actor)s, 'resume', %(reason)s, replay_id, case when %(force)s then jsonb_build_object('force', true) end
from resumed
returning replay_id;

-- name: list_replays
-- The latest replays of all tenants or of one tenant, or one replay. `after_id`: only replays with lower ids. A replay is
-- interrupted if emails are left and no session runs it, and stopping while a session still runs it.
select
    r.replay_id as id,
    case
        when r.state = 'running' and not a.is_active then 'interrupted'
        when r.state = 'stopped' and a.is_active then 'stopping'
        else r.state
    end as state,
    a.is_active, o.total, o.waiting, o.outcomes, r.include_held, r.per_second,
    coalesce(r.paced_with, array[]::bigint[]) as paced_with, r.reason, r.created_at, r.changed_at, r.source, r.selection,
    r.actor
from dispatcher.email_replay as r
cross join lateral (
    select dispatcher.named_lock_holder('replay ' || r.replay_id) is not null as is_active
) as a
cross join lateral (
    select
        coalesce(sum(emails), 0)::bigint as total,
        coalesce(sum(emails) filter (where outcome is null), 0)::bigint as waiting,
        coalesce(jsonb_object_agg(outcome, emails) filter (where outcome is not null), jsonb_build_object()) as outcomes
    from (
        select i.outcome, count(*) as emails
        from dispatcher.email_replay_item as i
        where i.replay_id = r.replay_id
        group by i.outcome
    ) as by_outcome
) as o
where (%(replay_id)s::bigint is null or r.replay_id = %(replay_id)s)
    and (%(after_id)s::bigint is null or r.replay_id < %(after_id)s)
    and (%(tenant_id)s::text is null or r.selection ->> 'tenant_id' = %(tenant_id)s)
order by r.replay_id desc
limit %(limit)s;

-- name: list_skipped
-- The emails that a replay skipped, and why.
select email_id, outcome
from dispatcher.email_replay_item
where replay_id = %(replay_id)s
    and outcome <> 'replayed'
order by email_id
limit %(limit)s;

-- name: count_replayed_by_status
-- The number of replayed emails of a replay by their current status; counts at most `limit` emails.
select l.status, count(*) as emails
from (
    select i.email_id
    from dispatcher.email_replay_item as i
    where i.replay_id = %(replay_id)s
        and i.outcome = 'replayed'
    limit %(limit)s
) as i
join dispatcher.email_log as l using (email_id)
group by l.status
order by count(*) desc, l.status;
