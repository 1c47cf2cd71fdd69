-- name: create_migration_table
-- Creates the table that records which migrations were applied.
create table dispatcher.dispatcher_migration (
    number integer primary key,
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default clock_timestamp()
);

-- name: find_schema
-- A row: the schema exists. Even `create schema if not exists` needs the right to create schemas.
select 1
from pg_namespace
where nspname = %(schema)s;

-- name: create_schema
-- Creates the schema for all our tables. No rows.
create schema dispatcher;

-- name: enter_schema
-- Sets the search_path until the transaction ends: migrations name tables without a schema. One row.
select set_config('search_path', quote_ident(%(schema)s) || ', pg_temp', true);

-- name: check_client
-- Makes PostgreSQL 14 or later end this session within a second after its client has died, even while it waits. One row.
select set_config('client_connection_check_interval', '1s', false);

-- name: try_lock_migrations
-- True: no other `init` is working. Then this session has the lock of `init` until unlock_migrations or its end, unless a
-- session has it whose role cannot become the owner of our tables (while there are none: this session's role): every role
-- can take the lock.
select
    pg_try_advisory_lock(hashtext('dispatcher_migration'))
    or exists (
        select
        from pg_locks as h
        join pg_stat_activity as a on a.pid = h.pid
        where h.locktype = 'advisory'
            and h.database = (select oid from pg_database where datname = current_database())
            and (h.classid::bigint << 32) | h.objid::bigint = hashtext('dispatcher_migration')::bigint
            and h.objsubid = 1
            and h.granted
            and not pg_has_role(
                a.usesysid,
                coalesce(
                    (select relowner from pg_class where oid = to_regclass('dispatcher.dispatcher_migration')),
                    (select oid from pg_roles where rolname = current_user)
                ),
                'member'
            )
    );

-- name: unlock_migrations
-- Releases the lock of try_lock_migrations.
select pg_advisory_unlock(hashtext('dispatcher_migration'));

-- name: limit_waits
-- Limits statements and waits for locks until the transaction ends; 0: no limit. Also names the table and the mode for
-- lock_table, which can have no parameters. One row.
select
    set_config('statement_timeout', %(statement_seconds)s::text || 's', true),
    set_config('lock_timeout', %(lock_seconds)s::text || 's', true),
    set_config('email_dispatcher.table', %(table)s, true),
    set_config('email_dispatcher.mode', %(mode)s, true);

-- name: lock_table
-- Locks the table of limit_waits, and its partitions, until the transaction ends. Does nothing if there is no such table.
do $$
begin
    if to_regclass(quote_ident(current_setting('email_dispatcher.table'))) is not null then
        execute format(
            'lock table %I in %s mode',
            current_setting('email_dispatcher.table'),
            current_setting('email_dispatcher.mode')
        );
    end if;
end
$$;

-- name: find_valid_indexes
-- The indexes in our schema that PostgreSQL uses: of a partitioned table, those that are valid on every partition.
select c.relname::text
from pg_index as i
join pg_class as c on c.oid = i.indexrelid
join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = %(schema)s
    and i.indisvalid;

-- name: prepare_build
-- For the statements of plan_build, which cannot be in a transaction: as enter_schema, and limits each wait. One row.
select
    set_config('search_path', quote_ident(%(schema)s) || ', pg_temp', false),
    set_config('statement_timeout', '0', false),
    set_config('lock_timeout', %(lock_seconds)s::text || 's', false);

-- name: plan_build
-- The statements, in order, that build an index while other sessions write, each with the estimated number of the
-- table's rows. The index of a partitioned table is built on each partition; when the index of the partitioned table
-- itself is created afterwards, PostgreSQL takes over these indexes. An invalid index of an interrupted build is dropped
-- first. No row: nothing is left to build concurrently. Needs prepare_build.
with part as (
    select
        c.oid, c.relname,
        case when c.oid = to_regclass(quote_ident(%(table)s)) then %(name)s else left(c.relname || '_' || %(name)s, 63) end
            as index_name
    from pg_class as c
    where c.relkind = 'r'
        and (
            c.oid = to_regclass(quote_ident(%(table)s))
            or c.oid in (select relid from pg_partition_tree(to_regclass(quote_ident(%(table)s))))
        )
)
select step.statement, p.relname::text, greatest(c.reltuples, 0)::bigint
from part as p
join pg_class as c on c.oid = p.oid
left join pg_index as i on i.indexrelid = to_regclass(quote_ident(p.index_name))
cross join lateral (
    values
        (1, case when not i.indisvalid then format('drop index concurrently %%I', p.index_name) end),
        (
            2,
            case
                when i.indisvalid is not true
                    then format(
                        'create %%sindex concurrently %%I on %%I%%s',
                        %(unique)s::text, p.index_name, p.relname, %(definition)s::text
                    )
            end
        )
) as step (number, statement)
where step.statement is not null
order by p.relname, step.number;

-- name: estimate_rows
-- For each of these tables that exists: the estimated number of its rows, with those of its partitions.
select t.name, coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint
from unnest(%(tables)s::text[]) with ordinality as t (name, number)
join pg_class as root on root.oid = to_regclass(quote_ident(%(schema)s) || '.' || quote_ident(t.name))
cross join lateral (
    select root.oid
    union
    select relid
    from pg_partition_tree(root.oid)
) as part (id)
join pg_class as c on c.oid = part.id and c.relkind = 'r'
group by t.name, t.number
order by t.number;

-- name: find_blockers
-- The oldest sessions, at most three, whose transactions are older than age_seconds and hold a lock on this table or its
-- partitions (on any of our tables, if its name is empty). A session that only reads counts only if blocks_readers.
-- PostgreSQL may not show when the transaction of a different user began; a prepared transaction has no pid.
select l.pid, a.usename::text, coalesce(nullif(a.application_name, ''), a.backend_type), min(a.xact_start)
from pg_locks as l
join pg_class as c on c.oid = l.relation and c.relkind in ('r', 'p')
join pg_namespace as n on n.oid = c.relnamespace
left join pg_stat_activity as a on a.pid = l.pid
where l.locktype = 'relation'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.granted
    and l.pid is distinct from pg_backend_pid()
    and n.nspname = %(schema)s
    and (%(table)s = '' or c.relname ~ ('^' || %(table)s || '(_p[0-9]+|_default)?$'))
    and (%(blocks_readers)s or l.mode not in ('AccessShareLock', 'RowShareLock'))
    and (a.xact_start is null or a.xact_start < clock_timestamp() - %(age_seconds)s * interval '1 second')
group by l.pid, a.usename, a.application_name, a.backend_type
order by min(a.xact_start) nulls last
limit 3;

-- name: find_migration_table
-- Whether our schema has our tables, and which other schemas have the tables of an email dispatcher. One row.
select
    to_regclass('dispatcher.dispatcher_migration') is not null,
    array(
        select n.nspname::text
        from pg_class as c
        join pg_namespace as n on n.oid = c.relnamespace
        where c.relname = 'dispatcher_migration'
            and c.relpersistence <> 't'
            and c.oid is distinct from to_regclass('dispatcher.dispatcher_migration')
            and exists (select from pg_attribute as a where a.attrelid = c.oid and a.attname = 'checksum')
        order by n.nspname
    );

-- name: list_migrations
-- The applied migrations, oldest first; without the mark of replace_old_record.
select number, name, checksum
from dispatcher.dispatcher_migration
where number > 0
order by number;

-- name: replace_old_record
-- Removes what a database of an earlier commit has beside the baseline: functions that this release does not call, and the
-- record of its migrations. A program of commit bb5680df that starts afterwards refuses the number 0, which it does not
-- know; without this mark, it would take the baseline for an edited file. No rows.
drop function if exists
    dispatcher.dead_emails(text, text, text, text, text, double precision, double precision, uuid[], boolean),
    dispatcher.find_dead_emails(text, text, text, text, text, double precision, double precision, uuid[], boolean),
    dispatcher.find_dead_emails(
        text, text, text, text, text, double precision, double precision, uuid[], boolean, text
    ),
    dispatcher.find_dead_emails(
        text, text, text, text, text, double precision, double precision, uuid[], boolean, text, text
    ),
    dispatcher.email_partition_prune(text, timestamptz);
comment on column dispatcher.host_presence.processes is
    'The processes of the host''s `dispatcher run`, as its monitor last reported them. Null: not reported yet.';
analyze dispatcher.dispatcher_database;
delete from dispatcher.dispatcher_migration;
insert into dispatcher.dispatcher_migration (number, name, checksum)
values (0, 'one_baseline', '');

-- name: record_migration
-- Records that a migration was applied, in the transaction that applied it. No rows.
insert into dispatcher.dispatcher_migration (number, name, checksum)
values (%(number)s, %(name)s, %(checksum)s);

-- name: find_database_id
-- The id that `dispatcher init` gave this database.
select database_id
from dispatcher.dispatcher_database;

-- name: find_address_key
-- The key with which addresses are hashed (see store/address_hashes.py).
select address_key
from dispatcher.dispatcher_database;

-- name: make_partitions
-- Creates the missing weekly partitions, from the current week on. Returns a row per new partition.
select dispatcher.email_partitions_make(clock_timestamp(), %(weeks_ahead)s);

-- name: show_server
-- Version, whether a commit waits for the disk, connections, streaming standbys, which standbys a commit waits for, and
-- whether the server is a standby and the session read-only. One row.
select
    current_setting('server_version'),
    current_setting('server_version_num')::integer,
    current_setting('synchronous_commit'),
    current_setting('fsync'),
    current_setting('max_connections')::integer,
    (select count(*) from pg_stat_replication),
    current_setting('synchronous_standby_names'),
    pg_is_in_recovery(),
    current_setting('transaction_read_only')::boolean;

-- name: write_nothing
-- Writes a message to the write-ahead log. Its commit waits for the same confirmations as others, but stores no row.
select pg_logical_emit_message(true, 'dispatcher', '');

-- name: mark_session
-- Sets a session setting that PostgreSQL does not use. One row.
select set_config('email_dispatcher.session', %(mark)s, false);

-- name: read_session_mark
-- Null or empty: a pooler has switched the connection to another session. One row.
select current_setting('email_dispatcher.session', true);

-- name: configure_session
-- Sets the settings of a new session. A commit waits for the disk, because the worker sends an email after the commit.
-- No statement waits for ever. The server detects within 15 seconds that a client's host has vanished, and releases the
-- client's locks. If a client is frozen in a transaction, which keeps the feed and VACUUM waiting, the server ends the
-- session. If idle_seconds is not null, the server ends the session after so many seconds without a statement.
-- Sequential scans are off, because every statement finds its rows by an index. Otherwise, PostgreSQL would plan a
-- sequential scan while a partition is almost empty, and keep this plan while the partition fills. This would happen
-- each Monday, until the next autoanalyze.
select
    set_config('synchronous_commit', 'on', false),
    set_config('statement_timeout', %(statement_seconds)s::text || 's', false),
    set_config('lock_timeout', %(lock_seconds)s::text || 's', false),
    set_config('idle_in_transaction_session_timeout', '60s', false),
    set_config(
        'idle_session_timeout',
        coalesce(
            (%(idle_seconds)s::double precision * 1000)::integer::text || 'ms', current_setting('idle_session_timeout')
        ),
        false
    ),
    set_config('enable_seqscan', 'off', false),
    set_config('jit', 'off', false),
    set_config('tcp_keepalives_idle', '5', false),
    set_config('tcp_keepalives_interval', '3', false),
    set_config('tcp_keepalives_count', '3', false),
    set_config('tcp_user_timeout', '15000', false);

-- name: disable_statement_timeout
-- Disables the statement timeout of configure_session, for a session that reads whole large tables.
select set_config('statement_timeout', '0', false);

-- name: keep_plans
-- Makes PostgreSQL plan each statement of a session once for all values (a generic plan). Used after configure_session,
-- for sessions that execute only a worker's statements (see lease.sql) or only a relay's statements. To plan a lease of
-- a few emails, or a search for due emails, takes longer than to execute it. Without this setting, PostgreSQL plans
-- each execution again after the tables were analysed.
-- A generic plan locks every partition with its indexes, about 9 relations per week. A plan for the given values locks
-- only the relations of one week. So generic plans are not forced if all sessions together might need more locks than
-- the server's memory allows, which is twice max_locks_per_transaction per session.
select set_config(
    'plan_cache_mode',
    case
        when 9 * (select count(*) from pg_inherits where inhparent = to_regclass('dispatcher.email_log'))
            < 2 * current_setting('max_locks_per_transaction')::integer
        then 'force_generic_plan'
        else 'auto'
    end,
    false
);
