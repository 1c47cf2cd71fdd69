-- Pruning looks whether a week is finished only once nobody can begin one of its emails anew.

-- As before (0008), but behind a lock on email_content: whoever makes an old email pending again reads its content in the
-- same statement, so he has committed by then, and is seen, or comes later, and finds the content gone. The lock is
-- asked for briefly, because everybody else waits behind it: where it cannot be had, the next round tries again.
create or replace function email_partition_prune(parent text, before_at timestamptz) returns setof text
language plpgsql as $$
declare
    ended record;
begin
    for ended in select * from email_partitions_ended(parent, before_at) loop
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
