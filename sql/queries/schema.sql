-- name: create_migration_table
-- Makes the runner's own table, once.
create table dispatcher.dispatcher_migration (
    number integer primary key,
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default clock_timestamp()
);

-- name: find_schema
-- A row: the schema exists. Asked first, because `create schema if not exists` needs the right to create one even then.
select 1
from pg_namespace
where nspname = %(schema)s;

-- name: create_schema
-- Makes the schema of all our tables. No rows.
create schema dispatcher;

-- name: enter_schema
-- Sets the search_path until the transaction ends: migrations name tables without a schema, and so find and make them in
-- ours alone. Functions keep this search_path (`set search_path from current`). One row.
select set_config('search_path', quote_ident(%(schema)s) || ', pg_temp', true);

-- name: lock_migrations
-- Held until the transaction ends, so that two `init` at once migrate once.
select pg_advisory_xact_lock(hashtext('dispatcher_migration'));

-- name: find_migration_table
-- Whether the schema has our tables, and which other schemas of this database have the tables of an email dispatcher. One row.
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
-- What was applied, oldest first.
select number, name, checksum
from dispatcher.dispatcher_migration
order by number;

-- name: record_migration
-- Notes that a migration was applied, in the transaction that applied it. No rows.
insert into dispatcher.dispatcher_migration (number, name, checksum)
values (%(number)s, %(name)s, %(checksum)s);

-- name: find_database_id
-- This database's identity, as `init` made it.
select database_id
from dispatcher.dispatcher_database;

-- name: make_partitions
-- Weekly partitions from the current week on; a row per partition that it made, none where all were there.
select dispatcher.email_partitions_make(clock_timestamp(), %(weeks_ahead)s);

-- name: show_server
-- For `doctor`: the server's version, whether a commit waits for the disk, how many connections there may be, how many standbys
-- stream, and whether a commit waits for any of them.
select
    current_setting('server_version'),
    current_setting('server_version_num')::integer,
    current_setting('synchronous_commit'),
    current_setting('fsync'),
    current_setting('max_connections')::integer,
    (select count(*) from pg_stat_replication),
    current_setting('synchronous_standby_names') <> '';

-- name: describe_writes
-- Whether the server takes no writes, because it is a standby or because it, the database or the role is set so; and
-- whose confirmation a commit waits for. One row.
select
    pg_is_in_recovery(),
    current_setting('transaction_read_only')::boolean,
    current_setting('synchronous_standby_names');

-- name: write_nothing
-- The smallest write whose commit waits for what any other's waits for: a message in the WAL that nobody reads. One row.
select pg_logical_emit_message(true, 'dispatcher', '');

-- name: mark_session
-- A setting that means nothing to PostgreSQL and lasts as long as the session. One row.
select set_config('email_dispatcher.session', %(mark)s, false);

-- name: read_session_mark
-- What mark_session set in this session; null or empty: a pooler has put another session behind the connection. One row.
select current_setting('email_dispatcher.session', true);

-- name: configure_session
-- A commit waits for the disk, because an outside action follows it; nothing waits for ever; and a client whose host
-- vanished without a word is noticed within a quarter of a minute, so that its locks are set free.
-- Every statement finds its rows by an index. A plan that was made while a partition was all but empty would read it from
-- end to end, and be kept while it fills: each Monday, and until the next autoanalyze.
select
    set_config('synchronous_commit', 'on', false),
    set_config('statement_timeout', %(statement_seconds)s::text || 's', false),
    set_config('lock_timeout', %(lock_seconds)s::text || 's', false),
    set_config('enable_seqscan', 'off', false),
    set_config('jit', 'off', false),
    set_config('tcp_keepalives_idle', '5', false),
    set_config('tcp_keepalives_interval', '3', false),
    set_config('tcp_keepalives_count', '3', false),
    set_config('tcp_user_timeout', '15000', false);

-- name: lift_statement_timeout
-- Besides configure_session, for who reads large tables from end to end and keeps nobody waiting meanwhile.
select set_config('statement_timeout', '0', false);

-- name: keep_plans
-- Besides configure_session, for who executes nothing but a worker's statements (see lease.sql) or the relay's: they are
-- planned once for all values, because planning a lease of a few emails, or a look at what is due, costs more than
-- executing it. Left alone, PostgreSQL plans them each time once the tables are analysed. A plan for all values locks every
-- partition with its indexes, some 9 relations per week, where one for its values locks those of its week alone. So not
-- where all sessions at once might need more locks than the server has room for, which are twice
-- max_locks_per_transaction for each.
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
