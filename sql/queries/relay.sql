-- name: listen_due
-- Wakes the relay when an enqueue commits.
listen email_dispatcher_due;

-- name: find_publish_due
-- Emails whose message must go to the send queue, longest due first; of those alone that are due since an instant or later.
-- A due mark is the time of its writing, or up to 90 seconds later (see enqueue and release). One that is
-- ahead_seconds ahead was written before the clock was set back: it is due, too. Two ranges, so that a look does not read the
-- emails between them: hundreds of thousands may wait there for a provider that is away.
(
    select email_id, message_key, correlation_id, traceparent, publish_due_at
    from dispatcher.email_log
    where publish_due_at >= %(since)s
        and publish_due_at < now()
    order by publish_due_at
    limit %(limit)s
)
union all
(
    select email_id, message_key, correlation_id, traceparent, publish_due_at
    from dispatcher.email_log
    where publish_due_at >= greatest(%(since)s, now() + %(ahead_seconds)s * interval '1 second')
    order by publish_due_at
    limit %(limit)s
)
order by publish_due_at
limit %(limit)s;

-- name: find_publish_due_ids
-- As find_publish_due where PostgreSQL cannot read one of the rows: the ids alone.
select email_id
from (
    (
        select email_id, publish_due_at
        from dispatcher.email_log
        where publish_due_at >= %(since)s
            and publish_due_at < now()
        order by publish_due_at
        limit %(limit)s
    )
    union all
    (
        select email_id, publish_due_at
        from dispatcher.email_log
        where publish_due_at >= greatest(%(since)s, now() + %(ahead_seconds)s * interval '1 second')
        order by publish_due_at
        limit %(limit)s
    )
) as due
order by publish_due_at
limit %(limit)s;

-- name: find_due_pointers
-- What find_publish_due returns, for these emails.
select email_id, message_key, correlation_id, traceparent, publish_due_at
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and publish_due_at is not null;

-- name: mark_published
-- A broker confirmed and routed these messages. Only what is due since the instant that their publisher knew: a lease has
-- taken the mark off meanwhile, and what became due again stays due.
-- It waits for nobody, and so stands in no lease's way. Returns the ids that are due as before, because somebody has locked
-- them: mostly a lease that is about to take the mark off itself.
-- No plan may begin with the instants, which many emails share (see lease.sql for `= any` and `is true`).
with free as (
    select email_id
    from dispatcher.email_log
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
        and (
            (email_id, publish_due_at) in (
                select t.email_id, t.due_at
                from unnest(%(email_ids)s::uuid[], %(due_ats)s::timestamptz[]) as t (email_id, due_at)
            )
        ) is true
    for update skip locked
),
marked as (
    update dispatcher.email_log
    set publish_due_at = null, published_at = clock_timestamp()
    where email_id = any(array(select email_id from free))
        and email_id between %(lowest_id)s and %(highest_id)s
    returning email_id
)
select email_id
from dispatcher.email_log
where (select count(*) from marked) < cardinality(%(email_ids)s::uuid[])
    and email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and (
        (email_id, publish_due_at) in (
            select t.email_id, t.due_at
            from unnest(%(email_ids)s::uuid[], %(due_ats)s::timestamptz[]) as t (email_id, due_at)
        )
        and email_id not in (select email_id from marked)
    ) is true;

-- name: find_dead_letter_due
-- Emails whose dead letter must go to the DLQ, longest due first; also marks from before the clock was set back, as above.
select
    email_id, tenant_id, message_key, correlation_id, status, error_type, last_error, attempt_count, provider,
    created_at, dead_letter_due_at, traceparent
from dispatcher.email_log
where dead_letter_due_at is not null
    and dead_letter_due_at not between now() and now() + %(ahead_seconds)s * interval '1 second'
order by dead_letter_due_at
limit %(limit)s;

-- name: find_dead_letter_due_ids
-- As find_dead_letter_due where PostgreSQL cannot read one of the rows: the ids alone.
select email_id
from dispatcher.email_log
where dead_letter_due_at is not null
    and dead_letter_due_at not between now() and now() + %(ahead_seconds)s * interval '1 second'
order by dead_letter_due_at
limit %(limit)s;

-- name: find_due_letters
-- What find_dead_letter_due returns, for these emails.
select
    email_id, tenant_id, message_key, correlation_id, status, error_type, last_error, attempt_count, provider,
    created_at, dead_letter_due_at, traceparent
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and dead_letter_due_at is not null
order by dead_letter_due_at;

-- name: find_bare_letter
-- The same of one email, without what may be damaged and is not needed.
select
    email_id, tenant_id, message_key, null, status, null, null, attempt_count, null,
    created_at, dead_letter_due_at, null
from dispatcher.email_log
where email_id = %(email_id)s
    and dead_letter_due_at is not null;

-- name: mark_dead_lettered
-- A broker confirmed and routed these dead letters. Only what is due since the instant in the letter: an email that
-- failed again since then has another letter due.
update dispatcher.email_log
set dead_letter_due_at = null
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and (
        (email_id, dead_letter_due_at) in (
            select t.email_id, t.due_at
            from unnest(%(email_ids)s::uuid[], %(due_ats)s::timestamptz[]) as t (email_id, due_at)
        )
    ) is true;

-- name: rescue_expired
-- Emails whose lease ended without a word from its owner. Nobody knows whether they left: by policy they are held, with a
-- dead letter due, or pending and due again; held, too, if no attempt is left, as in domain/decision.py. Not before a grace.
-- Only leases that are as find_expiring found them: a renewal since then keeps its lease. Returns a row per email that it
-- moved.
with expired as (
    select
        email_id,
        case
            when attempt_count - attempt_base < %(max_attempts)s then coalesce(on_uncertain, %(on_uncertain)s)
            else 'hold'
        end as policy
    from dispatcher.email_log
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
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
rescued as (
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
        error_type = 'outcome_unknown',
        last_error = case
            when e.locked_by ~ ' before the promotion$'
            then 'PostgreSQL was failed over to a standby without the last commits: the email may have been sent in them.'
            else 'The lease expired: its owner ended without saying whether the email left.'
        end,
        publish_due_at = case x.policy when 'hold' then null else clock_timestamp() end,
        dead_letter_due_at = case x.policy when 'hold' then clock_timestamp() end
    from expired as x
    where e.email_id = any(%(email_ids)s)
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and e.email_id = x.email_id
    returning e.email_id, e.correlation_id, e.status, e.attempt_count
)
select email_id, correlation_id, status, attempt_count
from rescued;

-- name: find_vanished
-- A row: there are emails whose message was published so long ago that a worker should have had it, unless many wait. Here
-- and below, a time ahead_seconds ahead of the clock counts as long ago: it was written before the clock was set back.
select 1
from dispatcher.email_log
where status = 'pending'
    and publish_due_at is null
    and published_at not between clock_timestamp() - %(age_seconds)s * interval '1 second'
        and clock_timestamp() + %(ahead_seconds)s * interval '1 second'
limit 1;

-- name: find_vanished_ids
-- The emails of find_vanished, some of them. Not those that a promotion has made uncertain, before workers had the time to
-- record what they hold.
select email_id
from dispatcher.email_log
left join dispatcher.relay_timeline as t on true
where status = 'pending'
    and publish_due_at is null
    and published_at not between clock_timestamp() - %(age_seconds)s * interval '1 second'
        and clock_timestamp() + %(ahead_seconds)s * interval '1 second'
    and (
        (published_at <= t.uncertain_before) is not true
        or t.doubted_at < clock_timestamp() - %(doubt_seconds)s * interval '1 second'
    )
order by email_id
limit %(limit)s;

-- name: republish_vanished
-- Makes the emails of find_vanished_ids due again; call it while the send queue is empty, so that their messages are not there
-- any more. After a promotion that lost commits (see timeline.sql) those that were published before it may have been sent: by
-- policy they are held, or due again. Returns a row per email that it moved, and whether it was so uncertain.
with vanished as (
    select
        email_id,
        case
            when (published_at <= t.uncertain_before) is not true then 'again'
            when attempt_count - attempt_base < %(max_attempts)s then coalesce(on_uncertain, %(on_uncertain)s)
            else 'hold'
        end as policy
    from dispatcher.email_log as e
    left join dispatcher.relay_timeline as t on true
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
        and status = 'pending'
        and publish_due_at is null
    order by email_id
    for update of e skip locked
)
update dispatcher.email_log as e
set
    status = case v.policy when 'hold' then 'held' else e.status end,
    lease_token = e.lease_token + case v.policy when 'again' then 0 else 1 end,
    was_uncertain = e.was_uncertain or v.policy <> 'again',
    rescued_token = case v.policy when 'again' then e.rescued_token end,
    error_type = case v.policy when 'again' then e.error_type else 'outcome_unknown' end,
    last_error = case v.policy
        when 'again' then e.last_error
        else 'PostgreSQL was failed over to a standby without the last commits: the email may have been sent in them.'
    end,
    publish_due_at = case when v.policy <> 'hold' then clock_timestamp() end,
    dead_letter_due_at = case v.policy when 'hold' then clock_timestamp() end
from vanished as v
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and e.email_id = v.email_id
returning e.email_id, e.correlation_id, e.status, e.attempt_count, v.policy <> 'again';

-- name: republish_overtaken
-- Makes some emails due again that emails published much later have overtaken: a queue keeps its order, so that their
-- message is lost, or with a worker that holds it unleased; a second one is harmless. Not those that a promotion has made
-- uncertain, which must not be held by mistake. Returns a row per email.
with overtaken as (
    select email_id
    from dispatcher.email_log
    where status = 'pending'
        and publish_due_at is null
        and (published_at <= (select uncertain_before from dispatcher.relay_timeline)) is not true
        and published_at < (
            select max(published_at) - %(age_seconds)s * interval '1 second'
            from dispatcher.email_log
            where status = 'sending'
        )
    order by email_id
    limit %(limit)s
    for update skip locked
)
update dispatcher.email_log
set publish_due_at = clock_timestamp()
where email_id = any(array(select email_id from overtaken))
returning email_id;
