-- name: prune_partition
-- Drops one partition of old emails that are finished and decided; its name, or zero rows where there is none left to
-- drop. Here and below, undecided_days is how long a failed or held email waits for a decision; 0: for ever.
select dispatcher.email_partition_prune(
    %(parent)s,
    statement_timestamp() - %(days)s * interval '1 day',
    case
        when %(undecided_days)s::integer = 0 then '-infinity'
        else statement_timestamp() - %(undecided_days)s::integer * interval '1 day'
    end
);

-- name: list_prunable_partitions
-- What prune_partition would drop, one after the other: a row per partition.
select partition
from dispatcher.email_partitions_ended(%(parent)s, clock_timestamp() - %(days)s * interval '1 day') as ended
where not dispatcher.email_log_must_stay(
    ended.from_id,
    ended.until_id,
    case
        when %(undecided_days)s::integer = 0 then '-infinity'
        else statement_timestamp() - %(undecided_days)s::integer * interval '1 day'
    end
)
    and not dispatcher.email_log_enqueued_since(
        ended.from_id, ended.until_id, clock_timestamp() - %(days)s * interval '1 day'
    );

-- name: forget_content
-- Deletes the content of some finished and decided emails of before an instant, where their partition could not go as a whole: of
-- weeks that ended before it, and of the default partition, which never goes. Returns a row per email. The statement's
-- time, because no index is searched by what may change from row to row.
with old as (
    select c.email_id
    from (
        select email_id
        from dispatcher.email_content
        where email_id < dispatcher.email_id_lowest_at(
            date_trunc('week', statement_timestamp() - %(days)s * interval '1 day', 'UTC')
        )
        union all
        select email_id
        from dispatcher.email_content_default
        where email_id >= dispatcher.email_id_lowest_at(
            date_trunc('week', statement_timestamp() - %(days)s * interval '1 day', 'UTC')
        )
            and email_id < dispatcher.email_id_lowest_at(statement_timestamp() - %(days)s * interval '1 day')
    ) as c
    join dispatcher.email_log as e on e.email_id = c.email_id
    where e.created_at < statement_timestamp() - %(days)s * interval '1 day'
        and e.status not in ('pending', 'sending')
        and (
            e.status = 'sent'
            or e.dead_letter_discarded_at is not null
            or (
                %(undecided_days)s::integer > 0
                and e.created_at < statement_timestamp() - %(undecided_days)s::integer * interval '1 day'
            )
        )
    order by c.email_id
    limit %(limit)s
    for update of e skip locked
),
attachments as (
    delete from dispatcher.email_attachment
    where email_id = any(array(select email_id from old))
)
delete from dispatcher.email_content
where email_id = any(array(select email_id from old))
returning email_id;

-- name: forget_one_time_codes
-- Deletes the content of some sent emails that have the mark of erase_after_sending. Returns a row per email.
with codes as (
    select c.email_id
    from dispatcher.email_content as c
    join dispatcher.email_log as e on e.email_id = c.email_id
    where c.tags ? 'one_time_code'
        and e.status = 'sent'
    limit %(limit)s
    for update of e skip locked
),
attachments as (
    delete from dispatcher.email_attachment
    where email_id = any(array(select email_id from codes))
)
delete from dispatcher.email_content
where email_id = any(array(select email_id from codes))
returning email_id;

-- name: forget_keys
-- Deletes some message keys of before an instant whose email is gone; an email of that key is a new one from then on.
-- Returns a row per key.
with old as (
    select k.ctid
    from dispatcher.email_idempotency as k
    where k.created_at < statement_timestamp() - %(days)s * interval '1 day'
        and not exists (select from dispatcher.email_log as e where e.email_id = k.email_id)
    limit %(limit)s
)
delete from dispatcher.email_idempotency
where ctid = any(array(select ctid from old))
returning email_id;

-- name: forget_replayed
-- Deletes some of what replays of before an instant noted of their emails. Returns a row per email of a replay.
with old as (
    select i.ctid
    from dispatcher.email_replay_item as i
    join dispatcher.email_replay as r using (replay_id)
    where r.created_at < statement_timestamp() - %(days)s * interval '1 day'
    limit %(limit)s
)
delete from dispatcher.email_replay_item
where ctid = any(array(select ctid from old))
returning email_id;

-- name: forget_replays
-- Deletes some replays of before an instant of which nothing is left but themselves. Returns a row per replay.
with old as (
    select r.ctid
    from dispatcher.email_replay as r
    where r.created_at < statement_timestamp() - %(days)s * interval '1 day'
        and not exists (select from dispatcher.email_replay_item as i where i.replay_id = r.replay_id)
    limit %(limit)s
)
delete from dispatcher.email_replay
where ctid = any(array(select ctid from old))
returning replay_id;

-- name: forget_acts
-- Deletes some acts of operators of before an instant. Returns a row per act.
select dispatcher.operator_audit_prune(clock_timestamp() - %(days)s * interval '1 day', %(limit)s);

-- name: count_expiring
-- Failed and held emails that are undecided and lose their content within warn_days: how many, and in how many seconds
-- the first of them may go (null if there is none). The range of ids, with a day for a producer's wrong clock, spares a
-- look at the younger ones.
select
    count(*),
    extract(epoch from min(created_at) + %(undecided_days)s * interval '1 day' - statement_timestamp())::double precision
from dispatcher.email_log as e
where status in ('failed', 'held')
    and email_id < dispatcher.email_id_lowest_at(statement_timestamp() - (%(undecided_days)s - %(warn_days)s - 1) * interval '1 day')
    and created_at < statement_timestamp() - (%(undecided_days)s - %(warn_days)s) * interval '1 day'
    and dead_letter_discarded_at is null
    and exists (select from dispatcher.email_content as c where c.email_id = e.email_id);
