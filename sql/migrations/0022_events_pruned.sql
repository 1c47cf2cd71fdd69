-- Events are pruned together with their emails.

-- As in 0018, and now for the events, too.
create or replace function email_partitions_ended(parent text, before_at timestamptz)
returns table (partition text, from_id uuid, until_id uuid)
language sql stable
set search_path from current
as $$
    select
        name,
        email_id_lowest_at(week at time zone 'UTC'),
        email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
    from (
        select c.relname::text as name, to_date(substring(c.relname from '_p(\d{8})$'), 'YYYYMMDD')::timestamp as week
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = to_regclass(quote_ident(parent))
            and parent in ('email_log', 'email_content', 'email_attachment', 'email_attempt', 'email_event')
    ) as weekly
    where (week + interval '1 week') at time zone 'UTC' <= before_at
    order by name
$$;

-- Events may arrive for the emails of earlier weeks. In the default partition, these events would never be pruned.
do $$
declare
    week timestamp;
    name text;
begin
    for week in
        select to_date(substring(c.relname from '_p(\d{8})$'), 'YYYYMMDD')::timestamp
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = 'email_log'::regclass
            and c.relname ~ '_p\d{8}$'
    loop
        name := to_char(week, '"email_event_p"YYYYMMDD');
        if to_regclass(name) is null then
            perform email_partition_make(
                'email_event',
                name,
                email_id_lowest_at(week at time zone 'UTC'),
                email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
            );
        end if;
    end loop;
end
$$;
