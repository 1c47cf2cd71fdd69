-- name: note_timeline
-- If PostgreSQL is still on the timeline that was recorded last, records the current time, and whether commits wait for
-- a standby. Writes nothing if the given state is the current one (see store/timeline.py): no transaction has written
-- anything since the last record, and synchronous_standby_names is unchanged. Returns the statement's snapshot,
-- synchronous_standby_names, and the id of this transaction; null if nothing was written. Zero rows: the timeline
-- changed, or no timeline was recorded yet.
with noted as (
    update dispatcher.relay_timeline
    set
        noted_at = clock_timestamp(),
        is_synchronous = current_setting('synchronous_standby_names') <> ''
    where timeline = ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer
        and concat(pg_current_snapshot(), ' ', current_setting('synchronous_standby_names')) <> %(quiet_state)s
    returning pg_current_xact_id()::text::bigint as transaction_id
)
select
    pg_current_snapshot()::text, current_setting('synchronous_standby_names'), (select transaction_id from noted)
from dispatcher.relay_timeline
where timeline = ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;

-- name: find_noted_timeline
-- The last recorded timeline, whether commits waited for a standby then, and the current timeline. Locks the row, so
-- that two relays wait for each other. No row: no timeline was recorded yet.
select
    timeline, is_synchronous, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer
from dispatcher.relay_timeline
for update;

-- name: begin_timeline
-- Records the current timeline. If commits may have been lost, messages become uncertain that were published before the
-- time of the last transaction that this server replayed as a standby. If the server has restarted since, this time is
-- unknown; the statement then uses the time at which a relay last recorded the timeline.
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

-- name: mark_leases_uncertain
-- Marks the leases that a promotion made uncertain. On the lost timeline, the results of their emails may have been
-- recorded, or the emails may have been leased again. So a ledger that does not contain these emails proves nothing.
-- The suffix on the worker's name excludes the leases from the recovery of dead workers. The worker can still renew and
-- record the leases by token. If it does not, the emails are recovered by policy after the leases expire.
update dispatcher.email_log
set locked_by = locked_by || %(suffix)s
where status = 'sending'
returning email_id;

-- name: find_uncertain_messages
-- Emails, after a given id, whose due marks were set before a promotion was detected. Their messages may have been
-- published and processed on the lost timeline. A due mark can be in the future when it is set. So three more kinds of
-- emails are included. First, emails that were released with a later due mark, which has passed since: the standby may
-- have lagged by the time in between. Second, emails that an API process publishes itself: their marks are some seconds
-- after the enqueue. Third, waiting emails whose time has come, because they may have been woken and sent on the lost
-- timeline. Seconds are added and not an interval, because a damaged created_at could make the sum out of range.
select e.email_id
from dispatcher.email_log as e
cross join dispatcher.relay_timeline as t
where e.status in ('pending', 'waiting')
    and e.email_id > %(after)s
    and e.created_at <= t.uncertain_before
    and (
        e.publish_due_at <= t.doubted_at
        or extract(epoch from e.publish_due_at) <= extract(epoch from e.created_at) + 10
        or e.wait_until <= t.doubted_at
    )
order by e.email_id
limit %(limit)s;

-- name: mark_messages_uncertain
-- Marks them as published. If RabbitMQ has no message for them, republish_lost decides by policy.
update dispatcher.email_log as e
set status = 'pending', wait_until = null, publish_due_at = null, published_at = t.uncertain_before
from dispatcher.relay_timeline as t
where {is_e_given}
    and e.status in ('pending', 'waiting')
    and (e.publish_due_at is not null or e.wait_until is not null)
returning e.email_id;
