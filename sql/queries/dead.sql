-- name: list_dead
-- A page of failed and held emails with ids below a given id, newest first, and how many emails match below this id.
select
    email_id, tenant_id, message_key, correlation_id, status, error_type, last_error, attempt_count, provider,
    created_at, dead_letter_due_at is not null, dead_letter_discarded_at, count(*) over ()
from dispatcher.find_dead_emails(
    %(status)s, %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
    %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
)
where %(before)s::uuid is null or email_id < %(before)s
order by email_id desc
limit %(limit)s;

-- name: count_dead
-- The number of failed and held emails per value of one property, most frequent value first.
select
    case %(by)s
        when 'status' then status
        when 'error_type' then coalesce(error_type, '-')
        when 'provider' then coalesce(provider, '-')
        when 'tenant' then tenant_id
        when 'error' then coalesce(last_error, '-')
        when 'domain' then coalesce(domain, '-')
    end as value,
    count(*),
    min(created_at),
    max(created_at)
from dispatcher.find_dead_emails(
    %(status)s, %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
    %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
) as e
-- An email counts once for each domain of its recipients. A function finds the domains, because not every role may read
-- addresses.
left join lateral unnest(
    case when %(by)s = 'domain' then dispatcher.recipient_domains(e.email_id) end
) as recipient (domain) on true
group by value
order by count(*) desc, value;

-- name: preview_dead
-- What a replay would do to the selected emails: for each outcome, the number of emails and the first ids. See
-- replay_next.
select
    case
        when l.expires_at <= clock_timestamp() then 'expired'
        when (e.status = 'held' or e.was_uncertain) and not %(include_held)s then 'may_have_arrived'
        when c.email_id is null then 'content_pruned'
        else 'replayed'
    end as outcome,
    count(*),
    (array_agg(e.email_id order by e.email_id))[1:%(sample)s]
from dispatcher.find_dead_emails(
    %(status)s, %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
    %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
) as e
left join dispatcher.email_content as c using (email_id)
left join dispatcher.email_log as l using (email_id)
group by outcome
order by outcome;

-- name: find_dead_ids
-- The ids of all selected emails, oldest first.
select email_id
from dispatcher.find_dead_emails(
    %(status)s, %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
    %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
)
order by email_id;

-- name: list_dead_page
-- A page of failed and held emails with ids below a given id, newest first. Reads only the emails of this page, so it
-- is fast however many emails match.
select
    e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.error_type, e.last_error, e.attempt_count,
    e.provider, e.created_at, e.dead_letter_due_at is not null, e.dead_letter_discarded_at
from dispatcher.find_dead_emails(
    %(status)s, %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
    %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
) as e
where %(before)s::uuid is null or e.email_id < %(before)s
order by e.email_id desc
limit %(limit)s;

-- name: group_dead
-- Groups the newest failed and held emails, at most `limit`, by cause (error type and provider) or by one property.
-- Returns the largest groups, at most `groups`, largest first. The last column is the number of all grouped emails.
with selected as (
    select e.email_id, e.tenant_id, e.status, e.error_type, e.provider, e.created_at
    from dispatcher.find_dead_emails(
        %(status)s, %(error_type)s, %(provider)s, %(tenant_id)s, %(text)s, %(older_than_seconds)s, %(newer_than_seconds)s,
        %(email_ids)s, %(discarded)s, %(tag)s, %(channel)s
    ) as e
    order by e.email_id desc
    limit %(limit)s
),
grouped as (
    select
        case %(by)s
            when 'cause' then array[e.error_type, e.provider]
            when 'tenant' then array[e.tenant_id]
            when 'domain' then array[recipient.domain]
        end as keys,
        count(*) as emails,
        count(*) filter (where e.status = 'held') as held,
        min(e.created_at) as oldest_at,
        max(e.created_at) as newest_at,
        max(e.email_id::text)::uuid as sample_id
    from selected as e
    left join lateral unnest(
        case when %(by)s = 'domain' then dispatcher.recipient_domains(e.email_id) end
    ) as recipient (domain) on true
    group by keys
    order by emails desc, keys
    limit %(groups)s
)
select
    g.keys, g.emails, g.held, g.oldest_at, g.newest_at, g.sample_id, s.last_error,
    (select count(*) from selected)
from grouped as g
left join dispatcher.email_log as s on s.email_id = g.sample_id
order by g.emails desc, g.keys;

-- name: find_known_ids
-- Those of the given ids that exist in email_log, with any status.
select email_id
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s;

-- name: discard_dead
-- Records that an operator discards the dead letters of these emails. The emails keep their status. An id is missing
-- from the result if the email is not failed or held, or was already discarded.
with discarded as (
    update dispatcher.email_log
    set
        dead_letter_discarded_at = clock_timestamp(),
        dead_letter_due_at = null
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
        and status in ('failed', 'held')
        and dead_letter_discarded_at is null
    returning email_id, attempt_count
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select %(actor)s, 'discard', %(reason)s, email_id, jsonb_build_object('attempts', attempt_count)
    from discarded
)
select email_id
from discarded;

-- name: find_dead_lettered
-- Failed and held emails whose dead letter must be on the DLQ: it was published, and no operator discarded it. An email
-- that failed because its recipients are suppressed has no dead letter.
select email_id, attempt_count
from dispatcher.email_log
where status in ('failed', 'held')
    and error_type is distinct from 'suppressed'
    and dead_letter_due_at is null
    and dead_letter_discarded_at is null;

-- name: republish_dead_letters
-- Makes the dead letters of these emails due again. Leaves out emails that have changed since the caller read them.
-- Returns the ids of the emails whose dead letter became due.
update dispatcher.email_log as e
set dead_letter_due_at = clock_timestamp()
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and (
        (e.email_id, e.attempt_count) in (
            select w.email_id, w.attempt_count
            from unnest(%(email_ids)s::uuid[], %(attempt_counts)s::integer[]) as w (email_id, attempt_count)
        )
        and e.status in ('failed', 'held')
        and e.error_type is distinct from 'suppressed'
        and e.dead_letter_due_at is null
        and e.dead_letter_discarded_at is null
    ) is true
returning e.email_id;

-- name: audit_orphans
-- Audits that an operator discards dead letters whose emails no longer exist, with the number of dead letters per
-- email. No rows.
insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
select %(actor)s, 'discard', %(reason)s, o.email_id, jsonb_build_object('letters', o.dead_letter_count)
from unnest(%(email_ids)s::uuid[], %(counts)s::integer[]) as o (email_id, dead_letter_count);

-- name: audit
-- Audits an action that changed no row in email_log. No rows.
insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
values (%(actor)s, %(action)s, %(reason)s, %(email_id)s, %(detail)s::jsonb);
