-- part: is_unsent
-- Whether an email can still be changed. An event has not proven that it was sent (see events.sql), and no promotion made
-- its message uncertain (see timeline.sql), because then a worker may be sending it.
status in ('pending', 'waiting')
and proven_by is null
and (
    status = 'waiting'
    or publish_due_at is not null
    or (published_at <= (select uncertain_before from dispatcher.relay_timeline)) is not true
)

-- part: unsent_emails
-- The pending and waiting emails that a filter selects.
dispatcher.email_log as e
where e.status in ('pending', 'waiting')
    and (%(lane)s::text is null or e.lane = %(lane)s)
    and (%(correlation_id)s::text is null or e.correlation_id = %(correlation_id)s)
    and {is_selected}

-- name: cancel_emails
-- Cancels the given emails that are pending or waiting, and audits each cancellation. After the commit, no worker can
-- lease the email. If RabbitMQ still has a message, a worker acknowledges it without an attempt.
-- Returns a row per email that exists: its verdict, and its previous status.
with found as (
    select email_id, status, {is_unsent} as is_unsent
    {given_and_locked}
),
changed as (
    update dispatcher.email_log as e
    set
        status = 'cancelled',
        wait_until = null,
        settled_at = clock_timestamp(),
        error_type = case when e.recipient_outcomes is null then 'cancelled' else 'partly_delivered' end,
        last_error = case
            when e.recipient_outcomes is not null
                then 'The email was cancelled after it was delivered to some of its recipients.'
        end,
        locked_by = null,
        locked_until = 'epoch',
        publish_due_at = null,
        dead_letter_due_at = null
    from found as f
    where e.email_id = any(array(select email_id from found where is_unsent))
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and e.email_id = f.email_id
    returning
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, 'cancelled' as kind, e.error_type as reason,
        null as provider, 'cancel' as act, jsonb_build_object('attempts', e.attempt_count, 'from', f.status) as detail
),
{audited_emails},
{announced}
select
    email_id,
    case when is_unsent then 'cancelled' when status = 'cancelled' then 'already_cancelled' else 'too_late' end
        as verdict,
    status
from found;

-- name: reschedule_emails
-- As cancel_emails, but the emails wait until send_at; if send_at has passed, they are due immediately. The time for
-- redeliveries counts from send_at. Does not change an email that expires before send_at.
with found as (
    select
        email_id, status, {is_unsent} as is_unsent,
        coalesce(expires_at <= greatest(%(send_at)s, clock_timestamp()), false) as expires_first
    {given_and_locked}
),
changed as (
    update dispatcher.email_log as e
    set
        status = 'waiting',
        wait_until = greatest(%(send_at)s, clock_timestamp()),
        wait_reason = 'scheduled',
        due_since = greatest(%(send_at)s, clock_timestamp()),
        redelivery_count = 0,
        locked_by = null,
        locked_until = 'epoch',
        published_at = null,
        publish_due_at = null
    from found as f
    where e.email_id = any(array(select email_id from found where is_unsent and not expires_first))
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and e.email_id = f.email_id
    returning
        e.email_id, e.wait_until as send_at, 'reschedule' as act,
        jsonb_build_object('attempts', e.attempt_count, 'from', f.status, 'send_at', e.wait_until) as detail
),
{audited_emails}
select
    f.email_id,
    case when not f.is_unsent then 'too_late' when f.expires_first then 'expires_first' else 'rescheduled' end as verdict,
    f.status,
    c.send_at
from found as f
left join changed as c using (email_id);

-- name: count_unsent
-- Counts the emails that a filter selects, at most `most`. Returns the number and the first ids for each status.
select status, count(*) as emails, (array_agg(email_id order by email_id))[1:%(sample)s] as ids
from (
    select status, email_id
    from {unsent_emails}
    limit %(most)s
) as selected
group by status
order by status;

-- name: find_unsent_ids
-- The emails that count_unsent counts, oldest first, at most `most` emails.
select email_id
from {unsent_emails}
order by email_id
limit %(most)s;
