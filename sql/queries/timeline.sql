-- name: note_timeline
-- The timeline is the one that was noted last: notes so, and whether commits wait for a standby. No row: it is another, or
-- none was noted yet.
update dispatcher.relay_timeline
set
    noted_at = clock_timestamp(),
    is_synchronous = current_setting('synchronous_standby_names') <> ''
where timeline = ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer
returning timeline;

-- name: find_noted_timeline
-- What was noted last on the history that this server knows, and the timeline now. Two relays at once wait for each other.
-- No row: none was noted yet.
select
    timeline,
    is_synchronous,
    ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer
from dispatcher.relay_timeline
for update;

-- name: begin_timeline
-- Notes the timeline that the relay finds. Where commits were lost, all that was published by the last transaction that this
-- server replayed is uncertain from now on; after a restart its time is unknown, and the time of the last note is used.
insert into dispatcher.relay_timeline (timeline, is_synchronous)
values (
    ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer,
    current_setting('synchronous_standby_names') <> ''
)
on conflict (is_only) do update
set
    timeline = excluded.timeline,
    is_synchronous = excluded.is_synchronous,
    uncertain_before = case
        when %(is_lossy)s then coalesce(pg_last_xact_replay_timestamp(), relay_timeline.noted_at)
        else relay_timeline.uncertain_before
    end,
    doubted_at = case when %(is_lossy)s then clock_timestamp() else relay_timeline.doubted_at end,
    noted_at = excluded.noted_at;

-- name: doubt_leases
-- Leases that a promotion has left: their emails may have been recorded or leased anew on the lost timeline, so that a ledger
-- which does not name them proves nothing. Under another owner's name no settlement gives them back; their worker may renew
-- and record them by their token all the same, and else the rescue judges them. Returns a row per lease.
update dispatcher.email_log
set locked_by = locked_by || %(suffix)s
where status = 'sending'
returning email_id;

-- name: find_doubted
-- Emails after an id whose due marks were set before a promotion was found: their messages may have been published and
-- processed on the lost timeline. Includes marks that were set ahead for an email given back, once they have passed: the
-- standby may have been that far behind. An API process that publishes by itself sets marks some seconds ahead.
select e.email_id
from dispatcher.email_log as e
cross join dispatcher.relay_timeline as t
where e.status = 'pending'
    and e.email_id > %(after)s
    and e.publish_due_at is not null
    and e.created_at <= t.uncertain_before
    and (e.publish_due_at <= t.doubted_at or e.publish_due_at <= e.created_at + interval '10 seconds')
order by e.email_id
limit %(limit)s;

-- name: doubt_messages
-- The emails of find_doubted count as published. Where RabbitMQ has no message for them, republish_vanished judges them.
-- Returns a row per email.
update dispatcher.email_log as e
set publish_due_at = null, published_at = t.uncertain_before
from dispatcher.relay_timeline as t
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and e.status = 'pending'
    and e.publish_due_at is not null
returning e.email_id;
