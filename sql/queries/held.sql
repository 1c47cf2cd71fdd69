-- name: list_held
-- A page of held emails, newest first, with everything that is known about each. Reads only the emails of this page.
with page as (
    select e.*
    from {dead_emails}
    where %(after_email_id)s::uuid is null or e.email_id < %(after_email_id)s
    order by e.email_id desc
    limit %(limit)s
)
select
    p.email_id, p.tenant_id, p.message_key, p.correlation_id, p.error_type, p.last_error as error, p.provider, p.attempt_count,
    p.created_at, p.dead_letter_discarded_at as discarded_at, p.provider_message_id, p.expires_at,
    exists (select from dispatcher.email_content as c where c.email_id = p.email_id) as has_content,
    last.worker, last.started_at, last.finished_at, last.outcome, last.provider_code,
    events.kinds as events
from page as p
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
order by p.email_id desc;

-- name: confirm_held
-- An operator confirms that held emails arrived. Returns a row per email that exists: its verdict, and previous status.
with found as (
    select email_id, status
    {given_and_locked}
),
changed as (
    update dispatcher.email_log as e
    set
        status = 'sent',
        sent_at = clock_timestamp(),
        locked_by = null,
        locked_until = 'epoch',
        dead_letter_due_at = null
    where e.email_id = any(array(select email_id from found where status = 'held'))
        and e.email_id between %(lowest_id)s and %(highest_id)s
    returning
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.provider, 'sent' as kind, null as reason,
        'confirm' as act, jsonb_build_object('attempts', e.attempt_count) as detail
),
counted as (
    insert into dispatcher.email_hourly (hour, provider, outcome, slot, email_count)
    select date_trunc('hour', now(), 'UTC'), coalesce(provider, 'unknown'), 'accepted', 'operator', count(*)
    from changed
    group by coalesce(provider, 'unknown')
    on conflict (hour, provider, outcome, slot) do update
    set email_count = email_hourly.email_count + excluded.email_count
),
{audited_emails},
{announced}
select
    email_id,
    case
        when status = 'held' then 'confirmed'
        when status = 'sent' then 'already_sent'
        when status in ('pending', 'waiting', 'sending') then 'under_way'
        else status
    end as verdict,
    status
from found;

-- name: release_held
-- Releases held emails, although they may have arrived (see made_pending). Returns a row per email that exists.
with item as (
    select email_id, status, true as is_of_held, true as include_held, 'infinity'::timestamptz as heeds_discards_from
    {given_and_locked}
),
{made_pending},
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select %(actor)s, 'release', %(reason)s, email_id, jsonb_build_object('attempts', attempt_count)
    from made_pending
)
select j.email_id, case j.outcome when 'replayed' then 'released' else j.outcome end as verdict, i.status
from judged as j
join item as i using (email_id);
