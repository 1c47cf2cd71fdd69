-- Retention keeps what an operator still has to decide: a failed or held email, until it is replayed, confirmed, released
-- or discarded, or until it was enqueued before undecided_since.

-- Whether an email of a range of ids must keep its content and its row. Two questions, because each can use the index of
-- unfinished emails.
create function email_log_must_stay(from_id uuid, until_id uuid, undecided_since timestamptz) returns boolean
language sql stable as $$
    select
        exists (
            select from email_log
            where email_id >= from_id
                and email_id < until_id
                and status in ('pending', 'sending')
        )
        or exists (
            select from email_log
            where email_id >= from_id
                and email_id < until_id
                and status in ('failed', 'held')
                and dead_letter_discarded_at is null
                and created_at >= undecided_since
        )
$$;

-- As in 0013, but undecided emails keep their week, too.
create function email_partition_prune(parent text, before_at timestamptz, undecided_since timestamptz) returns setof text
language plpgsql as $$
declare
    ended record;
begin
    for ended in select * from email_partitions_ended(parent, before_at) loop
        continue when email_log_must_stay(ended.from_id, ended.until_id, undecided_since);
        continue when email_log_enqueued_since(ended.from_id, ended.until_id, before_at);
        perform set_config('lock_timeout', '500ms', true);
        lock table email_content in access exclusive mode;
        if not email_log_must_stay(ended.from_id, ended.until_id, undecided_since) then
            execute format('drop table %I', ended.partition);
            return next ended.partition;
            return;
        end if;
    end loop;
end
$$;

-- The release before names no limit: it keeps what is undecided for ever.
create or replace function email_partition_prune(parent text, before_at timestamptz) returns setof text
language sql as $$
    select email_partition_prune(parent, before_at, '-infinity')
$$;
