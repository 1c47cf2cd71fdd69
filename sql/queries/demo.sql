-- name: list_demo_rows
-- The status of each email, read from the rows and not from a counter. Reads the whole table, because a demo's database
-- contains no other emails.
select email_id, message_key, status
from dispatcher.email_log;

-- name: list_demo_attempts
-- All attempts in a demo's database.
select email_id, attempt_number, worker, extract(epoch from started_at)::float8,
    extract(epoch from finished_at)::float8, outcome
from dispatcher.every_attempt
order by started_at;

-- name: try_demo_lock
-- Locks the server that environment variables specify. True: this session now has the lock, so no other demo uses the
-- server.
select pg_try_advisory_lock(hashtext('email_dispatcher_demo'));

-- name: drop_demo_database
-- Drops the demo's database, or the database that an interrupted demo left behind. No rows.
drop database if exists email_dispatcher_demo with (force);

-- name: create_demo_database
-- Creates a separate database for the demo, on the server that environment variables specify. No rows.
create database email_dispatcher_demo;
