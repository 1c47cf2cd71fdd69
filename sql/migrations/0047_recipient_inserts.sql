-- An enqueue does not write summaries of email_recipient.

-- As in 0033, but without `set search_path`, for which PostgreSQL would compute the path anew at the beginning and the end
-- of each call. So every name in it has its schema. Otherwise the caller's search_path could replace an operator or a
-- table, and read the key. No variable holds the key: in a plan, PostgreSQL would replace the variable by its value, and a
-- caller who logs plans (`debug_print_plan`) could read it.
do $migration$
begin
    execute format(
        $function$
        create or replace function hash_addresses(addresses text[]) returns bytea[]
        language plpgsql stable strict parallel safe security definer
        as $$
        begin
            return array(
                select pg_catalog.substring(
                    pg_catalog.sha256(
                        d.address_key_outer operator(pg_catalog.||) pg_catalog.sha256(
                            d.address_key_inner operator(pg_catalog.||) pg_catalog.convert_to(a.address, 'UTF8')
                        )
                    ),
                    1, 6
                )
                from %I.dispatcher_database as d
                cross join pg_catalog.unnest(addresses) as a (address)
            );
        end
        $$
        $function$,
        current_schema()
    );
end
$migration$;

-- As in 0001, and now for the recipients, too. PostgreSQL summarises the last, unfinished range of pages when it creates
-- an index, even if the table is empty. Each insert into this range would compress and write its summary again, which
-- takes almost as long as the rest of an enqueue. So the range gets its summary only when it is full.
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
end
$$;

-- The partitions whose first range of 16 pages is not full.
select email_partition_tune(c.relname)
from pg_inherits as h
join pg_class as c on c.oid = h.inhrelid
where h.inhparent = 'email_recipient'::regclass
    and pg_relation_size(c.oid) < 16 * current_setting('block_size')::integer;
