-- name: list_held
-- A page of held emails with ids above a given id, oldest first, and how many emails match above this id.
select
    email_id, tenant_id, message_key, correlation_id, provider, attempt_count, last_error, created_at,
    count(*) over ()
from dispatcher.find_dead_emails(
    'held', %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
    %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
)
where %(after)s::uuid is null or email_id > %(after)s
order by email_id
limit %(limit)s;

-- name: list_held_page
-- A page of held emails with ids above a given id, oldest first, with everything that is known about each email. Reads
-- only the emails of this page, so it is fast however many emails match.
with page as (
    select
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.error_type, e.last_error, e.provider, e.attempt_count,
        e.created_at, e.dead_letter_discarded_at
    from dispatcher.find_dead_emails(
        'held', %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
        %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
    ) as e
    where %(after)s::uuid is null or e.email_id > %(after)s
    order by e.email_id
    limit %(limit)s
)
select
    p.email_id, p.tenant_id, p.message_key, p.correlation_id, p.error_type, p.last_error, p.provider, p.attempt_count,
    p.created_at, p.dead_letter_discarded_at, l.provider_message_id, l.expires_at,
    exists (select from dispatcher.email_content as c where c.email_id = p.email_id),
    last.worker, last.started_at, last.finished_at, last.outcome, last.provider_code,
    events.kinds
from page as p
left join dispatcher.email_log as l on l.email_id = p.email_id
left join lateral (
    select a.worker, a.started_at, a.finished_at, a.outcome, a.provider_code
    from dispatcher.email_attempt as a
    where a.email_id = p.email_id
    order by a.attempt_number desc, a.finished_at desc
    limit 1
) as last on true
left join lateral (
    select array_agg(distinct v.kind) as kinds
    from dispatcher.email_event as v
    where v.email_id = p.email_id
        and v.doubt is distinct from 'impossible'
) as events on true
order by p.email_id;

-- name: confirm_held
-- Records that an operator confirms that a held email arrived. The email becomes `sent`, the email is counted, and the
-- confirmation is audited. Zero rows: the email is not held or does not exist; find_status
-- shows which.
with confirmed as (
    update dispatcher.email_log
    set
        status = 'sent',
        sent_at = clock_timestamp(),
        locked_by = null,
        locked_until = 'epoch',
        dead_letter_due_at = null
    where email_id = %(email_id)s
        and status = 'held'
    returning email_id, tenant_id, message_key, correlation_id, provider, attempt_count
),
counted as (
    insert into dispatcher.email_hourly (hour, provider, outcome, slot, email_count)
    select date_trunc('hour', now(), 'UTC'), coalesce(provider, 'unknown'), 'accepted', 'operator', 1
    from confirmed
    on conflict (hour, provider, outcome, slot) do update
    set email_count = email_hourly.email_count + excluded.email_count
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select %(actor)s, 'confirm', %(reason)s, email_id, jsonb_build_object('attempts', attempt_count)
    from confirmed
),
announced as (
    insert into dispatcher.outgoing_event (kind, email_id, tenant_id, message_key, correlation_id, provider)
    select 'sent', email_id, tenant_id, message_key, correlation_id, provider
    from confirmed
    where (select is_on from dispatcher.outgoing_feed)
)
select email_id
from confirmed;

-- name: release_held
-- Releases a held email for an operator. The email becomes pending and due. Only its later attempts count towards the
-- maximum. The release is audited. Zero rows: the email is not held, has no content, has expired, or does not exist;
-- find_status shows which.
with released as (
    update dispatcher.email_log as e
    set
        status = 'pending',
        attempt_base = e.attempt_count,
        due_since = clock_timestamp(),
        redelivery_count = 0,
        crash_count = 0,
        locked_by = null,
        locked_until = 'epoch',
        published_at = null,
        publish_due_at = clock_timestamp(),
        dead_letter_due_at = null,
        dead_letter_discarded_at = null
    where e.email_id = %(email_id)s
        and e.status = 'held'
        and (e.expires_at is null or e.expires_at > clock_timestamp())
        and exists (select from dispatcher.email_content as c where c.email_id = %(email_id)s)
    returning e.email_id, e.attempt_count
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select %(actor)s, 'release', %(reason)s, email_id, jsonb_build_object('attempts', attempt_count)
    from released
)
select
    email_id,
    case when not exists (select from dispatcher.relay_polls) then pg_notify('email_dispatcher_due', '') end
from released;

-- name: find_status
-- The status of one email, and whether the email has expired. Zero rows: the email does not exist.
select status, coalesce(expires_at <= clock_timestamp(), false)
from dispatcher.email_log
where email_id = %(email_id)s;
