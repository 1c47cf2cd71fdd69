-- Named locks become rows that only the dispatcher's roles can write. Before, they were advisory locks, which every role
-- that may connect to the database can take.

create table named_lock (
    name text collate "C" not null,
    pid integer not null,
    key integer not null,
    taken_at timestamptz not null default clock_timestamp(),
    constraint named_lock_pkey primary key (name)
);

comment on table named_lock is
    'Which session has which named lock. A row counts only while its session has the advisory lock (pid, key), so a lock ends with its session.';
comment on column named_lock.pid is 'The process id of the session in PostgreSQL.';
comment on column named_lock.key is
    'A random number, new each time the lock is taken. So another session with this pid does not count as the holder.';

-- The sessions that have the advisory lock that the release before took for a named lock. is_ours: the session's role
-- has the needed right to the emails. Every role may take an advisory lock, so a lock of any other role means nothing.
create function advisory_lock_holders(lock_name text, needed_right text) returns table (pid integer, is_ours boolean)
language sql stable
set search_path from current
as $$
    select h.pid, coalesce(has_table_privilege(a.usesysid, 'email_log', needed_right), false)
    from pg_locks as h
    join pg_stat_activity as a on a.pid = h.pid
    where h.locktype = 'advisory'
        and h.database = (select oid from pg_database where datname = current_database())
        and (h.classid::bigint << 32) | h.objid::bigint = hashtext('email_dispatcher_' || lock_name)::bigint
        and h.objsubid = 1
        and h.granted
$$;

-- The process id of the session that has the named lock; null if the lock is free. A process of the release before
-- counts, too. Executes as the owner, so that roles which only read need no right to the table.
create function named_lock_holder(lock_name text) returns integer
language sql stable
security definer
set search_path from current
as $$
    (
        select l.pid
        from named_lock as l
        join pg_locks as h
            on h.pid = l.pid
            and h.classid = l.pid::oid
            and h.objid = l.key::oid
        where l.name = lock_name
            and h.locktype = 'advisory'
            and h.database = (select oid from pg_database where datname = current_database())
            and h.objsubid = 2
            and h.granted
    )
    union all
    (
        select pid
        from advisory_lock_holders(lock_name, 'update')
        where is_ours
    )
    limit 1
$$;

comment on column email_replay.state is 'Whether it may go on; whether a process is running it shows in the named lock on its id.';

-- As in 0033, but concurrent calls wait for each other at a row that only the owner can lock.
create or replace function email_partitions_make(at timestamptz, weeks_ahead integer) returns setof text
language plpgsql
security definer
set search_path from current
as $$
declare
    parent text;
    week timestamp;
    name text;
begin
    perform from dispatcher_database for update;
    foreach parent in array array[
        'email_log', 'email_content', 'email_attachment', 'email_attempt', 'email_event', 'email_recipient'
    ] loop
        for step in 0..weeks_ahead loop
            week := date_trunc('week', at at time zone 'UTC') + step * interval '1 week';
            name := parent || to_char(week, '"_p"YYYYMMDD');
            if to_regclass(quote_ident(name)) is null then
                perform email_partition_make(
                    parent,
                    name,
                    email_id_lowest_at(week at time zone 'UTC'),
                    email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
                );
                return next name;
            end if;
        end loop;
    end loop;
end
$$;

-- As in 0046: the roles that may lease emails get their rights here.
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
        execute format('grant select, insert, update, delete on named_lock to %s', grantee);
    end loop;
end
$$;
