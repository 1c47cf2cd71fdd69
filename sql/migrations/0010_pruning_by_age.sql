-- Pruning goes by this database's clock: a producer whose clock is behind makes ids that look old.

-- As before (0009), but a week stays as long as an email of it was enqueued lately.
create or replace function email_partition_prune(parent text, before_at timestamptz) returns setof text
language plpgsql as $$
declare
    ended record;
begin
    for ended in select * from email_partitions_ended(parent, before_at) loop
        continue when exists (
            select from email_log
            where email_id >= ended.from_id and email_id < ended.until_id and created_at >= before_at
        );
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
