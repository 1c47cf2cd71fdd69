-- name: listen_due
-- Subscribes this session to the notifications of commits that make emails due.
listen email_dispatcher_due;

-- name: begin_polling
-- From now on, commits that make emails due no longer notify the relay. PostgreSQL lets only one notifying transaction
-- of a server commit at a time, so under load the relay polls instead. No rows.
insert into dispatcher.relay_polls
select
where not exists (select from dispatcher.relay_polls);

-- name: end_polling
-- From now on, commits that make emails due notify the relay. No rows.
delete from dispatcher.relay_polls;

-- name: find_waiting_notifier
-- A row if a commit waits for another one that notifies. PostgreSQL locks the object 0 of pg_database for such a commit.
select 1
from pg_locks
where locktype = 'object' and classid = 1262 and objid = 0 and database = 0 and not granted
limit 1;

-- part: due_pointer
-- What a message contains of an email `e`, and its due mark. A correlation id that is too long for a message is null.
-- With only_ids, all texts are null: used if PostgreSQL cannot read one of the rows.
e.email_id,
case when not %(only_ids)s then e.message_key end,
case when not %(only_ids)s and octet_length(e.correlation_id) <= 255 then e.correlation_id end,
case when not %(only_ids)s then e.traceparent end,
e.publish_due_at,
case when not %(only_ids)s then e.lane end,
case when not %(only_ids)s then e.tenant_id end

-- part: is_publishable
-- An expired email is not published, because cancel_expired is about to cancel it. Neither is an email whose message
-- key is too long for a message (255 characters): an application can insert such rows, and a page of them would hide all
-- other emails.
(e.expires_at is null or e.expires_at > now())
and case when octet_length(e.message_key) <= 1020 then char_length(e.message_key) <= 255 end

-- name: find_publish_due
-- Emails whose message must be published to a send queue, longest due first. A due mark is the time when it was
-- written, or up to four minutes later (see enqueue and release). A mark more than ahead_seconds ahead of the clock was
-- written before the clock was set back, so the email is due, too. Hundreds of thousands of emails that wait for an
-- unavailable provider may have marks between these two ranges (past, and far ahead), and are not read.
-- Marks of more than since_seconds ago are left out. While an old transaction is open, the index keeps the entries of
-- all marks that were cleared since it began, and a search from the first mark on would read them again each time.
-- Null: none is left out.
(
    select {due_pointer}
    from dispatcher.email_log as e
    where publish_due_at < now()
        and publish_due_at >= coalesce(now() - %(since_seconds)s::double precision * interval '1 second', '-infinity')
        and {is_publishable}
    order by publish_due_at
    limit %(limit)s
)
union all
(
    select {due_pointer}
    from dispatcher.email_log as e
    where publish_due_at >= now() + %(ahead_seconds)s * interval '1 second'
        and {is_publishable}
    order by publish_due_at
    limit %(limit)s
)
order by publish_due_at
limit %(limit)s;

-- name: find_due_pointers
-- As find_publish_due, for the given emails.
select {due_pointer}
from dispatcher.email_log as e
where {is_given}
    and publish_due_at is not null;

-- name: find_due_tenants
-- The lanes, except the given ones, and tenants that have emails with a due mark, which may be in the future. Takes one
-- step in the index for each of them.
with recursive lanes (lane) as (
    select min(lane)
    from dispatcher.email_log
    where publish_due_at is not null
    union all
    select (select min(e.lane) from dispatcher.email_log as e where e.publish_due_at is not null and e.lane > lanes.lane)
    from lanes
    where lanes.lane is not null
)
select lanes.lane, tenants.tenant_id
from lanes
cross join lateral (
    with recursive tenants (tenant_id) as (
        select min(e.tenant_id)
        from dispatcher.email_log as e
        where e.publish_due_at is not null
            and e.lane = lanes.lane
        union all
        select (
            select min(e.tenant_id)
            from dispatcher.email_log as e
            where e.publish_due_at is not null
                and e.lane = lanes.lane
                and e.tenant_id > tenants.tenant_id
        )
        from tenants
        where tenants.tenant_id is not null
    )
    select tenant_id
    from tenants
    where tenant_id is not null
) as tenants
where lanes.lane is not null
    and lanes.lane <> all(%(without_lanes)s::text[]);

-- name: count_due
-- For at most `pairs` pairs of a lane and a tenant: how many emails are due, counted up to `most`, and for how many
-- seconds the longest due email has been due.
with recursive pairs (lane, tenant_id, number) as (
    (
        select lane, tenant_id, 1
        from dispatcher.email_log
        where publish_due_at is not null
        order by lane, tenant_id
        limit 1
    )
    union all
    select next.lane, next.tenant_id, pairs.number + 1
    from pairs
    cross join lateral (
        select e.lane, e.tenant_id
        from dispatcher.email_log as e
        where e.publish_due_at is not null
            and (e.lane, e.tenant_id) > (pairs.lane, pairs.tenant_id)
        order by e.lane, e.tenant_id
        limit 1
    ) as next
    where pairs.number < %(pairs)s
)
select
    pairs.lane, pairs.tenant_id, due.emails::integer,
    coalesce(extract(epoch from clock_timestamp() - due.oldest)::double precision, 0) as oldest_seconds
from pairs
cross join lateral (
    select count(*) as emails, min(first.publish_due_at) filter (where isfinite(first.publish_due_at)) as oldest
    from (
        select e.publish_due_at
        from dispatcher.email_log as e
        where e.lane = pairs.lane
            and e.tenant_id = pairs.tenant_id
            and e.publish_due_at <= now()
        order by e.publish_due_at
        limit %(most)s
    ) as first
) as due
where due.emails > 0
order by due.emails desc, pairs.lane, pairs.tenant_id;

-- name: find_due_of_tenants
-- For each given lane and tenant: up to `most` due emails with a due mark from `since` to `until`, longest due first.
-- As in find_publish_due, two ranges are read; the second only if the first has fewer emails than wanted.
-- Rows are compared and ordered by lane, tenant and mark together, so that only the index on these three columns gives
-- the order. With `lane = …`, PostgreSQL could use the index on the mark alone. It would then read all due emails once
-- for each tenant.
select due.*
from unnest(
    %(lanes)s::text[], %(tenant_ids)s::text[], %(sinces)s::timestamptz[], %(until_ats)s::timestamptz[], %(mosts)s::integer[]
) as t (lane, tenant_id, since, until, most)
cross join lateral (
    (
        select {due_pointer}
        from dispatcher.email_log as e
        where (e.lane, e.tenant_id, e.publish_due_at) >= (t.lane, t.tenant_id, t.since)
            and (e.lane, e.tenant_id, e.publish_due_at) <= (t.lane, t.tenant_id, least(t.until, now()))
            and e.publish_due_at is not null
            and {is_publishable}
        order by e.lane, e.tenant_id, e.publish_due_at
        limit t.most
    )
    union all
    (
        select {due_pointer}
        from dispatcher.email_log as e
        where (e.lane, e.tenant_id, e.publish_due_at)
                >= (t.lane, t.tenant_id, greatest(t.since, now() + %(ahead_seconds)s * interval '1 second'))
            and (e.lane, e.tenant_id, e.publish_due_at) <= (t.lane, t.tenant_id, t.until)
            and e.publish_due_at is not null
            and {is_publishable}
        order by e.lane, e.tenant_id, e.publish_due_at
        limit t.most
    )
    limit t.most
) as due;

-- part: given_marks
-- The given emails with the due marks that the publisher read.
select t.email_id, t.due_at
from unnest(%(email_ids)s::uuid[], %(due_ats)s::timestamptz[]) as t (email_id, due_at)

-- name: mark_published
-- Clears the due marks of emails whose messages RabbitMQ confirmed and routed, if a mark is still the one that the
-- publisher read. The statement waits for no lock, so it delays no lease. It returns the ids of emails that are still
-- due because another transaction has locked their rows. Usually, that transaction is a lease statement, which clears
-- the mark itself. No plan may start from the instants, which many emails share (see lease.sql for `= any` and `is
-- true`).
with free as (
    select email_id
    from dispatcher.email_log
    where {is_given}
        and ((email_id, publish_due_at) in ({given_marks})) is true
    for update skip locked
),
marked as (
    update dispatcher.email_log
    set publish_due_at = null, published_at = clock_timestamp()
    where {is_free}
    returning email_id
)
select email_id
from dispatcher.email_log
where (select count(*) from marked) < cardinality(%(email_ids)s::uuid[])
    and {is_given}
    and ((email_id, publish_due_at) in ({given_marks}) and email_id not in (select email_id from marked)) is true;

-- name: find_dead_letter_due
-- Emails whose dead letter must be published to the DLQ, longest due first. Includes marks that were written before the
-- clock was set back, as in find_publish_due.
select email_id
from dispatcher.email_log
where dead_letter_due_at is not null
    and dead_letter_due_at not between now() and now() + %(ahead_seconds)s * interval '1 second'
order by dead_letter_due_at
limit %(limit)s;

-- name: find_due_dead_letters
-- The dead letters of these emails. Texts are truncated as in the dead letter, to need little memory. With is_minimal,
-- without the optional columns, which may be damaged.
select
    email_id, tenant_id, left(message_key, 4000), case when not %(is_minimal)s then left(correlation_id, 4000) end,
    status, case when not %(is_minimal)s then left(error_type, 4000) end,
    case when not %(is_minimal)s then left(last_error, 4000) end, attempt_count,
    case when not %(is_minimal)s then left(provider, 4000) end, created_at, dead_letter_due_at,
    coalesce(case when not %(is_minimal)s then left(channel, 4000) end, 'email'),
    case when not %(is_minimal)s then traceparent end
from dispatcher.email_log
where {is_given}
    and dead_letter_due_at is not null
order by dead_letter_due_at;

-- name: mark_dead_lettered
-- Clears a due mark only if it equals the time in the dead letter. If an email has failed again since, another is due.
update dispatcher.email_log
set dead_letter_due_at = null, dead_lettered_at = clock_timestamp()
where {is_given}
    and ((email_id, dead_letter_due_at) in ({given_marks})) is true;

-- name: recover_expired
-- Recovers emails whose lease expired without a result, so it is unknown whether they were sent. By policy, or if it has
-- no attempt left (see domain/decision.py), an email becomes held, with a dead letter due; otherwise pending and due.
-- Recovers only leases that ended more than grace_seconds ago and have not changed since find_expiring returned them.
with expired as (
    select
        email_id,
        case
            when attempt_count - attempt_base < coalesce(max_attempts, %(max_attempts)s)
                then coalesce(on_uncertain, %(on_uncertain)s)
            else 'hold'
        end as policy
    from dispatcher.email_log
    where {is_given}
        and (
            (email_id, lease_token, locked_until, status) in (
                select w.email_id, w.lease_token, w.expired_at, 'sending'
                from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[], %(expired_ats)s::timestamptz[])
                    as w (email_id, lease_token, expired_at)
            )
        ) is true
        and locked_until < now() - %(grace_seconds)s * interval '1 second'
    order by email_id
    for update skip locked
),
changed as (
    update dispatcher.email_log as e
    set
        status = case x.policy when 'hold' then 'held' else 'pending' end,
        lease_token = e.lease_token + 1,
        locked_by = null,
        locked_until = 'epoch',
        was_uncertain = true,
        rescued_from = case x.policy when 'hold' then e.locked_by end,
        rescued_token = case x.policy when 'hold' then e.lease_token end,
        rescued_in_doubt = case x.policy when 'hold' then e.was_uncertain end,
        settled_at = case x.policy when 'hold' then clock_timestamp() else e.settled_at end,
        error_type = 'outcome_unknown',
        last_error = case
            when e.locked_by ~ ' before the promotion$'
            then 'PostgreSQL failed over to a standby that lacks the last commits. The email may have been sent before the failover.'
            else 'The lease expired. Its worker ended without recording whether the email was sent.'
        end,
        publish_due_at = case x.policy when 'hold' then null else clock_timestamp() end,
        dead_letter_due_at = case when x.policy = 'hold' and e.channel is distinct from 'test' then clock_timestamp() end
    from expired as x
    where {is_e_given}
        and e.email_id = x.email_id
    returning
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.attempt_count, e.provider,
        case when e.status = 'held' then e.status end as kind, e.error_type as reason
),
{announced}
select email_id, correlation_id, status, attempt_count
from changed;

-- part: is_published
-- Whether an email's message was published, and no worker has leased the email since.
status = 'pending' and publish_due_at is null

-- name: find_lost_messages
-- The lanes with at least one email that is still pending although its message was published more than age_seconds ago.
-- The message is probably lost, unless many emails wait on the queue. Here and in find_lost_message_ids, a time more
-- than ahead_seconds ahead of the clock counts as long ago, because it was written before the clock was set back.
with recursive lanes (lane) as (
    select min(lane)
    from dispatcher.email_log
    where {is_published}
    union all
    select (select min(e.lane) from dispatcher.email_log as e where {is_published} and e.lane > lanes.lane)
    from lanes
    where lanes.lane is not null
)
select lane
from lanes
where exists (
        select from dispatcher.email_log as e
        where {is_published}
            and e.lane = lanes.lane
            and e.published_at < clock_timestamp() - %(age_seconds)s * interval '1 second'
    )
    or exists (
        select from dispatcher.email_log as e
        where {is_published}
            and e.lane = lanes.lane
            and e.published_at > clock_timestamp() + %(ahead_seconds)s * interval '1 second'
    );

-- name: find_lost_message_ids
-- Up to `limit` emails in the given lanes whose messages are probably lost (see find_lost_messages). Leaves out emails
-- that a promotion made uncertain, for doubt_seconds after the promotion was detected. In this time, workers can record
-- the results of in-flight emails.
select email_id
from dispatcher.email_log
left join dispatcher.relay_timeline as t on true
where status = 'pending'
    and publish_due_at is null
    and lane = any(%(lanes)s)
    and published_at not between clock_timestamp() - %(age_seconds)s * interval '1 second'
        and clock_timestamp() + %(ahead_seconds)s * interval '1 second'
    and (
        (published_at <= t.uncertain_before) is not true
        or t.doubted_at < clock_timestamp() - %(doubt_seconds)s * interval '1 second'
    )
order by email_id
limit %(limit)s;

-- name: republish_lost
-- Makes the emails of find_lost_message_ids due again, while their send queue is empty, which proves that the messages
-- are lost. After a promotion that lost commits (see timeline.sql), emails that were published before the promotion may
-- have been sent. By policy, these emails become held, or due again. The last column says so.
with vanished as (
    select
        email_id,
        case
            when (published_at <= t.uncertain_before) is not true then 'again'
            when attempt_count - attempt_base < coalesce(max_attempts, %(max_attempts)s)
                then coalesce(on_uncertain, %(on_uncertain)s)
            else 'hold'
        end as policy
    from dispatcher.email_log as e
    left join dispatcher.relay_timeline as t on true
    where {is_given}
        and status = 'pending'
        and publish_due_at is null
    order by email_id
    for update of e skip locked
),
changed as (
    update dispatcher.email_log as e
    set
        status = case v.policy when 'hold' then 'held' else e.status end,
        lease_token = e.lease_token + case v.policy when 'again' then 0 else 1 end,
        was_uncertain = e.was_uncertain or v.policy <> 'again',
        rescued_token = case v.policy when 'again' then e.rescued_token end,
        settled_at = case v.policy when 'hold' then clock_timestamp() else e.settled_at end,
        error_type = case v.policy when 'again' then e.error_type else 'outcome_unknown' end,
        last_error = case v.policy
            when 'again' then e.last_error
            else 'PostgreSQL failed over to a standby that lacks the last commits. The email may have been sent before the failover.'
        end,
        publish_due_at = case when v.policy <> 'hold' then clock_timestamp() end,
        dead_letter_due_at = case when v.policy = 'hold' and e.channel is distinct from 'test' then clock_timestamp() end
    from vanished as v
    where {is_e_given}
        and e.email_id = v.email_id
    returning
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.attempt_count, e.provider,
        case when e.status = 'held' then e.status end as kind, e.error_type as reason, v.policy <> 'again' as was_uncertain
),
{announced}
select email_id, correlation_id, status, attempt_count, was_uncertain
from changed;

-- name: republish_overtaken
-- Makes emails due again if other emails on the same send queue were published more than age_seconds later and are
-- already being sent. A queue keeps its order. So the message of the earlier email is lost, or a worker has received it
-- and has not leased the email yet. In the second case, a second message is harmless. Emails on other queues prove
-- nothing, so pass only the lanes of one queue. Leaves out emails that a promotion made uncertain, because they must
-- not become held by mistake. Returns a row per email.
with overtaken as (
    select email_id
    from dispatcher.email_log
    where status = 'pending'
        and publish_due_at is null
        and lane = any(%(lanes)s)
        and (published_at <= (select uncertain_before from dispatcher.relay_timeline)) is not true
        and published_at < (
            select max(published_at) - %(age_seconds)s * interval '1 second'
            from dispatcher.email_log
            where status = 'sending'
                and lane = any(%(lanes)s)
        )
    order by email_id
    limit %(limit)s
    for update skip locked
)
update dispatcher.email_log
set publish_due_at = clock_timestamp()
where email_id = any(array(select email_id from overtaken))
returning email_id;
