-- part: is_selected
-- Whether the filters of failed, held and unsent emails select the email `e`. A parameter that is null does not filter.
(%(status)s::text is null or e.status = %(status)s)
and (%(channel)s::text is null or coalesce(e.channel, 'email') = %(channel)s)
and (%(tenant_id)s::text is null or e.tenant_id = %(tenant_id)s)
and (
    %(tag)s::text is null
    or (select c.tags ? %(tag)s from dispatcher.email_content as c where c.email_id = e.email_id)
)
and (
    %(metadata)s::text is null
    or (
        select
            c.metadata ->> split_part(%(metadata)s, '=', 1) = substring(%(metadata)s from strpos(%(metadata)s, '=') + 1)
        from dispatcher.email_content as c
        where c.email_id = e.email_id
    )
)
and (
    %(older_than_seconds)s::double precision is null
    or e.created_at < now() - %(older_than_seconds)s * interval '1 second'
)
and (
    %(newer_than_seconds)s::double precision is null
    or e.created_at > now() - %(newer_than_seconds)s * interval '1 second'
)
and (%(email_ids)s::uuid[] is null or e.email_id = any(%(email_ids)s))

-- part: is_dead_selected
-- Whether the filter of `Selection` (domain/failures.py) selects the failed or held email `e`. Emails that failed because
-- their recipients are suppressed or kept back are decided, and have no dead letter: only their error type or their ids
-- select them.
(%(error_type)s::text is null or e.error_type = %(error_type)s)
and (
    ({has_letter})
    or %(channel)s = 'test'
    or %(error_type)s in ('suppressed', 'kept_back')
    or %(email_ids)s::uuid[] is not null
)
and (%(provider)s::text is null or e.provider = %(provider)s)
and (%(text)s::text is null or position(lower(%(text)s) in lower(e.last_error)) > 0)
and (%(discarded)s::boolean is null or (e.dead_letter_discarded_at is not null) = %(discarded)s)
and {is_selected}

-- part: has_letter
-- Whether an email `e` that failed or is held has a dead letter: its recipients were neither suppressed nor kept back,
-- and no test key enqueued it. The first condition is that of the index email_log_undecided.
e.error_type is distinct from 'suppressed'
and e.error_type is distinct from 'kept_back'
and e.channel is distinct from 'test'

-- part: dead_emails
-- The failed and held emails that a filter selects. Two branches, because an index has each status in the order of ids:
-- for `status in (…)`, PostgreSQL may read a whole week of sent emails to find the newest.
(
    select e.* from dispatcher.email_log as e where e.status = 'failed' and {is_dead_selected}
    union all
    select e.* from dispatcher.email_log as e where e.status = 'held' and {is_dead_selected}
) as e

-- name: list_dead
-- A page of failed and held emails, newest first. Reads only the emails of this page, however many emails match.
select
    e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.error_type, e.last_error as error, e.attempt_count,
    e.provider, e.created_at, e.dead_letter_due_at is not null as is_letter_due,
    e.dead_letter_discarded_at as discarded_at
from {dead_emails}
where %(after_email_id)s::uuid is null or e.email_id < %(after_email_id)s
order by e.email_id desc
limit %(limit)s;

-- name: group_dead
-- Groups the newest failed and held emails, at most `limit`. Returns the largest groups, largest first. An email counts
-- once for each domain of its recipients: a function finds the domains, because not every role may read addresses.
with selected as (
    select e.email_id, e.tenant_id, e.status, e.error_type, e.last_error, e.provider, e.created_at
    from {dead_emails}
    order by e.email_id desc
    limit %(limit)s
),
grouped as (
    select
        case %(by)s
            -- Words with a digit or an address distinguish emails, not causes.
            when 'cause' then array[
                e.error_type,
                e.provider,
                regexp_replace(
                    regexp_replace(left(e.last_error, 120), '\S*[0-9@]\S*', '…', 'g'), '(…\s+)+…', '…', 'g'
                )
            ]
            when 'error_type' then array[e.error_type]
            when 'provider' then array[e.provider]
            when 'tenant' then array[e.tenant_id]
            when 'status' then array[e.status]
            when 'error' then array[e.last_error]
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
    array_to_string(g.keys, ', ', '-') as value, g.emails, g.oldest_at, g.newest_at, g.keys, g.held, g.sample_id,
    s.message_key as sample_key, s.last_error as sample_error,
    (select count(*) from selected) as emails_in_all
from grouped as g
left join dispatcher.email_log as s on s.email_id = g.sample_id
order by g.emails desc, g.keys;

-- name: preview_dead
-- What a replay would do to the selected emails (see replay_next): for each outcome, their number and the first ids.
select
    case
        when e.expires_at <= clock_timestamp() then 'expired'
        when (e.status = 'held' or e.was_uncertain) and not %(include_held)s then 'may_have_arrived'
        when c.email_id is null then 'content_pruned'
        else 'replayed'
    end as outcome,
    count(*) as emails,
    (array_agg(e.email_id order by e.email_id))[1:%(sample)s] as sample
from {dead_emails}
left join dispatcher.email_content as c using (email_id)
group by outcome
order by outcome;

-- name: find_dead_ids
-- The ids of the selected emails, oldest first; at most `most`.
select e.email_id
from {dead_emails}
order by e.email_id
limit %(most)s;

-- name: count_dead
-- The selected emails by status: their number and the first ids. Counts at most `most` emails.
select status, count(*) as emails, (array_agg(email_id order by email_id))[1:%(sample)s] as ids
from (
    select e.email_id, e.status
    from {dead_emails}
    order by e.email_id
    limit %(most)s
) as e
group by status
order by status;

-- name: discard_dead
-- Discards the dead letters of failed and held emails, which keep their status. Returns a row per email that exists.
with found as (
    select
        email_id, status,
        case
            when status not in ('failed', 'held') then 'not_dead'
            when dead_letter_discarded_at is not null then 'already_discarded'
            else 'discarded'
        end as verdict
    {given_and_locked}
),
changed as (
    update dispatcher.email_log as e
    set
        dead_letter_discarded_at = clock_timestamp(),
        dead_letter_due_at = null
    where e.email_id = any(array(select email_id from found where verdict = 'discarded'))
        and e.email_id between %(lowest_id)s and %(highest_id)s
    returning e.email_id, 'discard' as act, jsonb_build_object('attempts', e.attempt_count) as detail
),
{audited_emails}
select email_id, verdict, status
from found;

-- part: is_dead_lettered
-- Whether an email's dead letter must be on the DLQ: it was published, and no operator discarded it. An email that
-- failed because its recipients are suppressed or kept back has no dead letter. Needs the email `e`.
e.status in ('failed', 'held')
and {has_letter}
and dead_letter_due_at is null
and dead_letter_discarded_at is null

-- name: find_dead_lettered
-- The emails whose dead letter must be on the DLQ.
select email_id, attempt_count
from dispatcher.email_log as e
where {is_dead_lettered};

-- name: count_dead_lettered
-- How many emails find_dead_lettered finds.
select count(*)
from dispatcher.email_log as e
where {is_dead_lettered};

-- name: republish_dead_letters
-- Makes the dead letters of these emails due again, except of emails that have changed since the caller read them.
update dispatcher.email_log as e
set dead_letter_due_at = clock_timestamp()
where {is_e_given}
    and (
        (e.email_id, e.attempt_count) in (
            select w.email_id, w.attempt_count
            from unnest(%(email_ids)s::uuid[], %(attempt_counts)s::integer[]) as w (email_id, attempt_count)
        )
        and {is_dead_lettered}
    ) is true
returning e.email_id;

-- name: find_dead_letter_emails
-- The emails with these ids, such as those of dead letters. No row: the email does not exist.
select email_id, message_key, status, attempt_count, dead_letter_discarded_at is not null
from dispatcher.email_log
where {is_given};

-- name: audit
-- Audits an action that changed no row in email_log, for each email (null: for none). No rows.
insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
select %(actor)s, %(action)s, %(reason)s, email_id, detail
from unnest(%(email_ids)s::uuid[], %(details)s::jsonb[]) as t (email_id, detail);
