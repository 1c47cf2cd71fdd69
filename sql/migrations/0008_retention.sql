-- Retention: old emails leave by whole partitions, and what must be forgotten sooner by rows.

-- One-time codes, forgotten as soon as they are sent; small by nature.
create index email_content_one_time on email_content (email_id) where tags ? 'one_time_code';

-- Keys are written in the order of time, so that a summary of blocks finds the old ones.
create index email_idempotency_created on email_idempotency using brin (created_at) with (pages_per_range = 16);

-- The weekly partitions of a table whose week ended before an instant, oldest first, with their range of ids.
create function email_partitions_ended(parent text, before_at timestamptz)
returns table (partition text, from_id uuid, until_id uuid)
language sql stable as $$
    select
        name,
        email_id_lowest_at(week at time zone 'UTC'),
        email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
    from (
        select c.relname::text as name, to_date(substring(c.relname from '_p(\d{8})$'), 'YYYYMMDD')::timestamp as week
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = to_regclass(quote_ident(parent))
    ) as weekly
    where (week + interval '1 week') at time zone 'UTC' <= before_at
    order by name
$$;

-- Drops the oldest partition of a table whose week ended before an instant, unless an email of that week is unfinished;
-- returns its name, or nothing where there is no such partition. An email that a person replays at this moment either
-- keeps the partition or is found without content.
create function email_partition_prune(parent text, before_at timestamptz) returns setof text
language plpgsql as $$
declare
    ended record;
begin
    for ended in select * from email_partitions_ended(parent, before_at) loop
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
