-- name: list_demo_rows
-- Where every single email stands, counted by nobody. Scans: for a demo's database, which holds nothing else.
select l.email_id, l.message_key, l.status, k.completed_at is not null
from dispatcher.email_log as l
left join dispatcher.email_idempotency as k on k.email_id = l.email_id;

-- name: list_demo_attempts
-- Every attempt, as of a demo's database.
select email_id, attempt_number, worker, extract(epoch from started_at)::float8,
    extract(epoch from finished_at)::float8, outcome
from dispatcher.email_attempt
order by started_at;

-- name: try_demo_lock
-- On a server that the environment names. True: this session's demo is the only one there until it ends.
select pg_try_advisory_lock(hashtext('email_dispatcher_demo'));

-- name: drop_demo_database
-- What an earlier demo was kept from dropping goes the same way as our own. No rows.
drop database if exists email_dispatcher_demo with (force);

-- name: create_demo_database
-- A database of the demo's own beside the one that the environment names. No rows.
create database email_dispatcher_demo;
