-- A lease and a record each add an entry for a new version of the row to the primary key. Without room for them,
-- PostgreSQL would search a full page for superfluous entries, then split it. The entries of email_log_unfinished have
-- different keys, so they cannot share a key. Locks only indexes, so a running autovacuum does not block it.
create function email_partition_tune_indexes(partition text) returns void
language plpgsql
set search_path from current
as $$
declare
    tuning text;
begin
    for tuning in
        select
            format('alter index %s set (%s)', h.inhrelid::regclass, case h.inhparent
                when 'email_log_pkey'::regclass then 'fillfactor = 40'
                else 'deduplicate_items = off'
            end)
        from pg_inherits as h
        join pg_index as i on i.indexrelid = h.inhrelid
        where i.indrelid = to_regclass(quote_ident(partition))
            and h.inhparent in ('email_log_pkey'::regclass, 'email_log_unfinished'::regclass)
    loop
        execute tuning;
    end loop;
end
$$;

-- As in 0047, and now for indexes, too.
create or replace function email_partition_tune(partition text) returns void
language plpgsql
set search_path from current
as $$
begin
    if partition like 'email_log%' then
        execute format(
            'alter table %I set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, '
            'autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 1)',
            partition
        );
    end if;
    if partition like 'email_recipient%' then
        perform brin_desummarize_range(
            i.indexrelid, pg_relation_size(i.indrelid) / current_setting('block_size')::integer
        )
        from pg_index as i
        join pg_class as c on c.oid = i.indexrelid
        join pg_am as a on a.oid = c.relam and a.amname = 'brin'
        where i.indrelid = to_regclass(quote_ident(partition));
    end if;
    perform email_partition_tune_indexes(partition);
end
$$;

select email_partition_tune_indexes(c.relname)
from pg_inherits as h
join pg_class as c on c.oid = h.inhrelid
where h.inhparent = 'email_log'::regclass;
