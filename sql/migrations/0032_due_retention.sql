-- Retention counts from when an email could first be sent: an email may be scheduled for a time weeks after its week.
-- Otherwise it would be pruned as soon as it is sent, and an undecided email before an operator could decide.

-- As in 0026.
create or replace function email_log_must_stay(from_id uuid, until_id uuid, undecided_since timestamptz) returns boolean
language sql stable
set search_path from current
as $$
    select
        exists (
            select from email_log
            where email_id >= from_id
                and email_id < until_id
                and status in ('pending', 'sending', 'waiting')
        )
        or exists (
            select from email_log
            where email_id >= from_id
                and email_id < until_id
                and status in ('failed', 'held')
                and dead_letter_discarded_at is null
                and greatest(created_at, due_since) >= undecided_since
        )
$$;

-- As in 0013.
create or replace function email_log_enqueued_since(from_id uuid, until_id uuid, since timestamptz) returns boolean
language plpgsql stable
cost 1000000
set enable_seqscan = on
set search_path from current
as $$
declare
    is_found boolean;
begin
    execute 'select exists ('
        'select from email_log where email_id >= $1 and email_id < $2 and greatest(created_at, due_since) >= $3'
        ')'
    into is_found
    using from_id, until_id, since;
    return is_found;
end
$$;
