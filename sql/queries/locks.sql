-- name: find_locked
-- The given emails for which another transaction has now locked the row, or the row of the message key. The statement
-- waits for no lock, and its own locks end with the statement. Keys are looked up one by one (`lateral`, `offset 0`),
-- so that no plan reads all keys.
with free as (
    select email_id, tenant_id, message_key
    from dispatcher.email_log
    where {is_given}
    order by email_id
    for no key update skip locked
),
free_key as (
    select k.tenant_id, k.message_key
    from free as f
    cross join lateral (
        select tenant_id, message_key
        from dispatcher.email_idempotency
        where tenant_id = f.tenant_id
            and message_key = f.message_key
        for no key update skip locked
    ) as k
)
select e.email_id
from dispatcher.email_log as e
where {is_e_given}
    and (
        not exists (select from free as f where f.email_id = e.email_id)
        or exists (
            select from dispatcher.email_idempotency as k
            where k.tenant_id = e.tenant_id
                and k.message_key = e.message_key
                and not exists (
                    select from free_key as f
                    where f.tenant_id = k.tenant_id
                        and f.message_key = k.message_key
                )
            offset 0
        )
    );

-- name: find_holders
-- The oldest sessions, at most five, that may have locked rows of emails or keys. PostgreSQL shows the holder of a row
-- lock only to a session that waits for the lock, so these sessions are only candidates. Statement texts are left out,
-- because they may contain private data. For the session of a different user, PostgreSQL may show only the pid; a
-- prepared transaction has no pid. The last column is true if the transaction is committed on this server and waits for
-- a synchronous standby.
select
    l.pid, a.application_name, a.state, extract(epoch from clock_timestamp() - min(a.xact_start))::double precision,
    coalesce(a.wait_event = 'SyncRep', false)
from pg_locks as l
left join pg_stat_activity as a on a.pid = l.pid
where l.locktype = 'relation'
    and l.database = (select oid from pg_database where datname = current_database())
    and (
        l.relation = 'dispatcher.email_idempotency'::regclass
        or l.relation in (select relid from pg_partition_tree('dispatcher.email_log'::regclass))
    )
    and l.granted
    and l.mode not in ('AccessShareLock', 'ShareUpdateExclusiveLock')
    and l.pid is distinct from pg_backend_pid()
    and a.wait_event_type is distinct from 'Lock'
    and (a.xact_start is null or a.xact_start < clock_timestamp() - %(age_seconds)s * interval '1 second')
group by l.pid, a.application_name, a.state, a.wait_event
order by min(a.xact_start) nulls first
limit 5;
