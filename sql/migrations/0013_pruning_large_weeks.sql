-- Pruning asks what is cheap first, and reads a week from end to end at most once per table.

-- Whether an email of a range of ids was enqueued since an instant. An index on created_at would cost every enqueue, for a
-- question of once a week; without one each row is read, and in the order of the disk, not of the ids. The text is planned
-- for these values: a plan for any values would take the range to be small.
create function email_log_enqueued_since(from_id uuid, until_id uuid, since timestamptz) returns boolean
language plpgsql stable
cost 1000000
set enable_seqscan = on
as $$
declare
    is_found boolean;
begin
    execute 'select exists (select from email_log where email_id >= $1 and email_id < $2 and created_at >= $3)'
    into is_found
    using from_id, until_id, since;
    return is_found;
end
$$;

-- As before (0010), but what is unfinished is looked for first, too: it is found by an index, and a week that has to stay
-- for it is not read.
create or replace function email_partition_prune(parent text, before_at timestamptz) returns setof text
language plpgsql as $$
declare
    ended record;
begin
    for ended in select * from email_partitions_ended(parent, before_at) loop
        continue when exists (
            select from email_log
            where email_id >= ended.from_id and email_id < ended.until_id and status in ('pending', 'sending')
        );
        continue when email_log_enqueued_since(ended.from_id, ended.until_id, before_at);
        perform set_config('lock_timeout', '500ms', true);
        lock table email_content in access exclusive mode;
        if not exists (
            select from email_log
            where email_id >= ended.from_id and email_id < ended.until_id and status in ('pending', 'sending')
        ) then
            execute format('drop table %I', ended.partition);
            return next ended.partition;
            return;
        end if;
    end loop;
end
$$;

comment on column email_log.on_uncertain is
    'Null: the policy of the host that settles it: mostly the one that sends, but the leader where that one vanished.';
