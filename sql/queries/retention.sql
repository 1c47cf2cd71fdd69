-- name: prune_partition
-- Zero rows: no partition is left to drop. Here and below, a finished email is sent, cancelled, failed or held. An
-- undecided email is failed or held, and no operator has decided what becomes of it. undecided_days is how long an
-- undecided email is kept; 0 means for ever.
select dispatcher.email_partition_prune(
    %(parent)s,
    statement_timestamp() - %(days)s * interval '1 day',
    {undecided_since}
);

-- part: undecided_since
case
    when %(undecided_days)s::integer = 0 then '-infinity'
    else statement_timestamp() - %(undecided_days)s::integer * interval '1 day'
end

-- name: list_prunable_partitions
-- The partitions that repeated calls of prune_partition would drop.
select partition
from dispatcher.email_partitions_ended(%(parent)s, clock_timestamp() - %(days)s * interval '1 day') as ended
where not dispatcher.email_log_must_stay(
    ended.from_id, ended.until_id, {undecided_since}
)
    and not dispatcher.email_log_enqueued_since(
        ended.from_id, ended.until_id, clock_timestamp() - %(days)s * interval '1 day'
    );

-- part: deleted_content
-- Deletes the content of the emails in `old`.
attachments as (
    delete from dispatcher.email_attachment
    where email_id = any(array(select email_id from old))
)
delete from dispatcher.email_content
where email_id = any(array(select email_id from old))
returning email_id

-- name: delete_content
-- Of up to `limit` emails that are finished and older than `days`, counted from when an email could first be sent, and
-- whose partition was not dropped: it has other emails, or it is the default partition. Uses statement_timestamp(),
-- because PostgreSQL cannot search an index by a value that may change from row to row.
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
    where greatest(e.created_at, e.due_since) < statement_timestamp() - %(days)s * interval '1 day'
        and e.status in ('sent', 'cancelled', 'failed', 'held')
        and (
            e.status in ('sent', 'cancelled')
            or e.dead_letter_discarded_at is not null
            or (
                %(undecided_days)s::integer > 0
                and greatest(e.created_at, e.due_since) < statement_timestamp() - %(undecided_days)s::integer * interval '1 day'
            )
        )
    order by c.email_id
    limit %(limit)s
    for update of e skip locked
),
{deleted_content};

-- name: delete_one_time_codes
-- Deletes the content of sent or cancelled emails with `erase_after_sending`, and the hashes of their recipients.
with old as (
    select c.email_id
    from dispatcher.email_content as c
    join dispatcher.email_log as e on e.email_id = c.email_id
    where c.tags ? 'one_time_code'
        and e.status in ('sent', 'cancelled')
    limit %(limit)s
    for update of e skip locked
),
recipients as (
    delete from dispatcher.email_recipient
    where email_id = any(array(select email_id from old))
),
{deleted_content};

-- name: delete_keys
-- Keys that are older than `days` and whose email no longer exists. A later email with such a key counts as new.
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

-- name: delete_replay_items
-- Deletes up to `limit` per-email records of replays older than `days`. Returns a row per record.
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

-- name: delete_replays
-- Deletes replays that are older than `days` and have no per-email records left. Returns a row per replay.
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

-- name: delete_audit_records
-- Deletes up to `limit` audit records older than `days`. Returns a row per record.
select dispatcher.operator_audit_prune(clock_timestamp() - %(days)s * interval '1 day', %(limit)s);

-- name: count_expiring
-- The number of undecided emails that lose their content within warn_days, and the seconds until the first may lose it.
-- Emails that failed because all their recipients are suppressed or kept back do not count, because no operator needs to decide. The
-- range of ids excludes younger emails without reading them. It allows for a producer's clock that is wrong by a day.
select
    count(*),
    extract(epoch from min(greatest(created_at, due_since)) + %(undecided_days)s * interval '1 day' - statement_timestamp())::double precision
from dispatcher.email_log as e
where status in ('failed', 'held')
    and email_id < dispatcher.email_id_lowest_at(statement_timestamp() - (%(undecided_days)s - %(warn_days)s - 1) * interval '1 day')
    and greatest(created_at, due_since) < statement_timestamp() - (%(undecided_days)s - %(warn_days)s) * interval '1 day'
    and isfinite(greatest(created_at, due_since))
    and dead_letter_discarded_at is null
    and {has_letter}
    and exists (select from dispatcher.email_content as c where c.email_id = e.email_id);
