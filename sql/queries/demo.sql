-- name: list_statuses
-- Where every single email stands, counted by nobody. Scans: for a demo's database, which holds nothing else.
select email_id, status
from dispatcher.email_log;

-- name: try_demo_lock
-- On a server that the environment names. True: this session's demo is the only one there until it ends.
select pg_try_advisory_lock(hashtext('email_dispatcher_demo'));

-- name: drop_demo_database
-- What an earlier demo was kept from dropping goes the same way as our own. No rows.
drop database if exists email_dispatcher_demo with (force);

-- name: create_demo_database
-- A database of the demo's own beside the one that the environment names. No rows.
create database email_dispatcher_demo;
