-- Look-ups by recipient stay fast although PostgreSQL may leave summaries of email_recipient missing or unfinished.

-- Checks the summaries of a partition of email_recipient, and creates them again if look-ups read too many pages
-- because of them. Returns whether it has done so.
--
-- Autovacuum creates the summaries of new pages, but forgets requests if there are many. If the creation of a summary
-- is cancelled, or the server stops during it, the summary stays unfinished, and no vacuum finishes it. Each look-up
-- then also reads all later pages of the partition (seen with PostgreSQL 15 and 18). Only a superuser's extension shows
-- unfinished summaries. So this function measures how many pages are read for a recipient that does not exist.
create function email_recipient_summarize(partition text) returns boolean
language plpgsql
security definer
set search_path from current
set enable_seqscan = off
set max_parallel_workers_per_gather = 0
set jit = off
-- Shorter than deadlock_timeout. A session that waits longer for autovacuum's lock cancels autovacuum.
set lock_timeout = '500ms'
as $$
declare
    range_pages constant integer := 16;  -- as in 0033
    summaries regclass;
    pages integer;
    plan json;
    replaces boolean;
    has_changed boolean := false;
begin
    select i.indexrelid::regclass, pg_relation_size(i.indrelid) / current_setting('block_size')::integer
    into summaries, pages
    from pg_inherits as h
    join pg_index as i on i.indrelid = h.inhrelid
    join pg_class as c on c.oid = i.indexrelid
    join pg_am as a on a.oid = c.relam and a.amname = 'brin'
    where h.inhparent = 'email_recipient'::regclass
        and h.inhrelid = to_regclass(quote_ident(partition));
    if summaries is null then
        return false;
    end if;
    -- First the ranges without a summary; then, if still too many pages are read, every range.
    foreach replaces in array array[false, true] loop
        execute format(
            'explain (analyze, timing off, format json) select from %I where address_hash = %L and domain = %L',
            partition, '\x', ''
        ) into plan;
        -- The last range is summarised when it is full, and the ranges before it within a minute or two.
        exit when coalesce((plan -> 0 -> 'Plan' ->> 'Lossy Heap Blocks')::bigint, 0) <= 4 * range_pages + pages / 20;
        for first_page in 0..pages - range_pages by range_pages loop
            if replaces then
                perform brin_desummarize_range(summaries, first_page);
            end if;
            perform brin_summarize_range(summaries, first_page);
        end loop;
        has_changed := true;
    end loop;
    return has_changed;
exception
    when lock_not_available or undefined_table then  -- vacuum works on the partition, or it was dropped just now
        return false;
end
$$;

revoke execute on function email_recipient_summarize(text) from public;

-- As in 0023: the roles that may lease emails get their rights here.
do $$
declare
    grantee text;
begin
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_log'::regclass
            and acl.privilege_type = 'UPDATE'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant execute on function email_recipient_summarize(text) to %s', grantee);
    end loop;
end
$$;
