-- name: store_events
-- Stores events. The lists have one item per event, sorted by email and event key. Leaves out events that are already
-- stored, and events whose email does not exist. In the same commit, sets the delivery state of their emails, and marks
-- each email that is not `sent`, because the event proves that the provider accepted the email. No worker can lease a
-- marked email; settle_proven settles it. An email that was delivered to some recipients is not marked: the event does
-- not prove that the others have the email.
-- An event is impossible if no worker can have sent the email through the provider: no worker has leased the email, or
-- each attempt is recorded and none names the provider. An impossible event is stored, and has no other effect. An
-- attempt that is not recorded may be in progress, or its host is lost, so it may have used any provider. The record of
-- an attempt may be lost, too, if the email is uncertain although no recorded attempt is, and if the email is older than
-- a promotion that lost commits.
-- New events also suppress recipients for the tenant of the email. Repeated events do not, because they would restore
-- an entry that an operator has removed. A complaint that names several recipients of an email suppresses none of them:
-- a provider that does not know who complained names every recipient at the same server. An event with a doubt
-- suppresses no recipient. An unsubscribe with the code `group` suppresses only for the topic of its email; see OF_TOPIC.
-- Ids, hashes and instants are sent in binary, because psycopg takes about 15 µs to write a hash as text.
-- Returns a row per provider, kind, bounce and mailbox provider: the number of events, of new events, of new events
-- that are impossible, and of events without an email; the seconds from acceptance to delivery of newly delivered
-- emails; and, the same in every row, all marked emails that no worker has leased.
-- An event of a provider, without an account, may be about an email of any of its accounts, and counts as one of the
-- email's own account.
with known as (
    select
        email_id, status, sent_at, tenant_id, message_key, correlation_id, provider, attempt_count, was_uncertain,
        topic, created_at <= (select uncertain_before from dispatcher.relay_timeline) as may_lack_attempts
    from dispatcher.email_log
    where email_id = any(%(email_ids)b)
        and email_id between %(lowest_id)s and %(highest_id)s
),
given as (
    select
        t.email_id, t.event_key, coalesce(k.provider, t.provider) as provider, t.kind, t.bounce, t.address_hash,
        t.masked, t.code, t.detail, t.happened_at, t.mailbox, t.doubt
    from unnest(
        %(email_ids)b::uuid[],
        %(event_keys)b::bytea[],
        %(providers)s::text[],
        %(kinds)s::text[],
        %(bounces)s::text[],
        %(address_hashes)b::bytea[],
        %(masked)s::text[],
        %(codes)s::text[],
        %(details)s::text[],
        %(happened_ats)b::timestamptz[],
        %(mailboxes)s::text[],
        %(doubts)s::text[]
    ) as t (
        email_id, event_key, provider, kind, bounce, address_hash, masked, code, detail, happened_at, mailbox, doubt
    )
    left join known as k on k.email_id = t.email_id and split_part(k.provider, ':', 1) = t.provider
),
-- The attempts of emails whose rows do not name the event's provider. Nearly always, there are none.
tried as materialized (
    select
        email_id, count(distinct attempt_number) as recorded_count,
        array_agg(distinct provider) || array_agg(distinct split_part(provider, ':', 1)) as providers,
        bool_or(outcome = 'uncertain') as is_uncertain
    from dispatcher.every_attempt
    where email_id = any(
            array(
                select k.email_id
                from known as k
                join given as g using (email_id)
                where k.provider is distinct from g.provider
            )
        )
        and email_id between %(lowest_id)s and %(highest_id)s
    group by email_id
),
stored as (
    insert into dispatcher.email_event (
        email_id, event_key, provider, kind, bounce, address_hash, code, detail, happened_at, doubt
    )
    select
        g.email_id, g.event_key, g.provider, g.kind, g.bounce, g.address_hash, g.code, g.detail, g.happened_at,
        case
            when k.provider = g.provider
                or k.status = 'sending'
                or k.attempt_count > coalesce(t.recorded_count, 0)
                or g.provider = any(t.providers)
                or (k.was_uncertain and t.is_uncertain is not true)
                or k.may_lack_attempts
                then g.doubt
            else 'impossible'
        end
    from given as g
    join known as k using (email_id)
    left join tried as t using (email_id)
    order by g.email_id, g.event_key
    on conflict (email_id, event_key) do nothing
    returning email_id, event_key, provider, kind, bounce, code, address_hash, happened_at, doubt
),
announced as (
    insert into dispatcher.outgoing_event (
        kind, email_id, tenant_id, message_key, correlation_id, provider, code, bounce, address_hash, happened_at
    )
    select
        case s.kind when 'deferred' then 'delayed' else s.kind end, s.email_id, k.tenant_id, k.message_key,
        k.correlation_id, s.provider, s.code, s.bounce, s.address_hash, s.happened_at
    from stored as s
    join known as k using (email_id)
    where (select is_on from dispatcher.outgoing_feed)
        and s.kind <> 'accepted'
        and s.doubt is distinct from 'impossible'
    order by s.happened_at
),
reasoned as (
    select
        s.email_id, s.event_key, s.address_hash, k.tenant_id,
        case when s.kind = 'unsubscribed' and s.code = 'group' then k.topic end as topic,
        case
            when s.bounce = 'hard' then 'hard_bounce'
            when s.kind = 'unsubscribed' then 'unsubscribe'
            when s.kind = 'complained' and not exists (
                select from given as g
                where g.email_id = s.email_id and g.kind = s.kind and g.address_hash <> s.address_hash
            ) then 'complaint'
            when s.bounce = 'soft' and %(soft_bounces)s::integer > 0 and (
                select count(distinct b.email_id) filter (where b.email_id <> s.email_id) + 1
                from (
                    select v.email_id
                    from dispatcher.email_event as v
                    join dispatcher.email_log as e using (email_id)
                    where v.address_hash = s.address_hash
                        and v.bounce = 'soft'
                        and v.doubt is null
                        and v.received_at > now() - %(soft_bounce_days)s::integer * interval '1 day'
                        and e.tenant_id = k.tenant_id
                    union all
                    select o.email_id
                    from stored as o
                    join known as e using (email_id)
                    where o.address_hash = s.address_hash
                        and o.bounce = 'soft'
                        and o.doubt is null
                        and e.tenant_id = k.tenant_id
                ) as b
            ) >= %(soft_bounces)s::integer then 'soft_bounce'
        end as reason
    from stored as s
    join known as k using (email_id)
    where s.address_hash is not null
        and s.doubt is null
        and (s.kind in ('complained', 'unsubscribed') or s.bounce in ('hard', 'soft'))
),
suppressed as (
    insert into dispatcher.suppression as p (
        tenant_id, is_domain, masked, reason, source_email_id, source_event_key, expires_at, address_hash, topic,
        recipient_hash
    )
    select distinct on (r.tenant_id, r.address_hash, r.topic)
        r.tenant_id, false, g.masked, r.reason, r.email_id, r.event_key,
        case when %(suppress_days)s::integer > 0 then now() + %(suppress_days)s::integer * interval '1 day' end,
        {entry_key}
    from reasoned as r
    join (select email_id, event_key, masked from given) as g using (email_id, event_key)
    where r.reason = any(%(suppress_on)s::text[])
        or r.reason = 'soft_bounce'
    order by r.tenant_id, r.address_hash, r.topic, r.email_id, r.event_key
    on conflict (tenant_id, address_hash) do update
    set {new_suppression}
    where p.expires_at is not null
        and (excluded.expires_at is null or excluded.expires_at > p.expires_at)
),
-- In the order of the ids, so that two hosts which store events of the same emails do not lock them crosswise.
believed as materialized (
    select email_id, min(provider) as provider, max(dispatcher.email_delivery_of(kind, bounce)) as delivery
    from stored
    where doubt is distinct from 'impossible'
    group by email_id
    order by email_id
),
marked as (
    update dispatcher.email_log as e
    set
        delivery = greatest(e.delivery, b.delivery),
        proven_by = case when e.status <> 'sent' and e.recipient_outcomes is null then b.provider else e.proven_by end
    from believed as b
    where e.email_id = b.email_id
        and e.email_id = any(array(select email_id from believed))
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and (
            (e.status <> 'sent' and e.recipient_outcomes is null) is true
            or b.delivery > e.delivery
            or (e.delivery is null and b.delivery is not null)
        )
    returning
        e.email_id, e.status, e.status <> 'sent' and e.recipient_outcomes is null as is_marked
),
counted as (
    select
        s.provider, s.kind, s.bounce, g.mailbox, true as is_new, false as is_unknown,
        (s.doubt = 'impossible') is true as is_impossible,
        case
            when s.kind = 'delivered' and isfinite(sent_at)
                then extract(epoch from s.happened_at - sent_at)::double precision
        end as seconds
    from stored as s
    join known using (email_id)
    join (select distinct email_id, event_key, mailbox from given) as g using (email_id, event_key)
    union all
    select provider, kind, bounce, mailbox, false, email_id not in (select email_id from known), false, null
    from given
)
select
    provider, kind, bounce, mailbox, count(*) filter (where not is_new),
    count(*) filter (where is_new and not is_impossible),
    count(*) filter (where is_impossible), count(*) filter (where is_unknown), array_remove(array_agg(seconds), null),
    array(select email_id from marked where is_marked and status <> 'sending')
from counted
group by provider, kind, bounce, mailbox;

-- name: fill_deliveries
-- Sets the delivery states of emails whose events an earlier release stored: reads the next `most` events, in the order
-- in which they were stored, and notes how far it came. Ends when all events are read, a day after the upgrade. Leaves out the events of the last five minutes, because a transaction that stores some may
-- still be open. One row: whether it has ended, and how many events were read. No row: it ended earlier, or another host
-- reads at the same time.
with position as (
    select read_until, lasts_until
    from dispatcher.delivery_backfill
    for no key update skip locked
),
read as materialized (
    select v.email_id, v.kind, v.bounce, v.doubt, v.received_at
    from dispatcher.email_event as v
    where v.received_at >= (select read_until from position)
        and v.received_at < clock_timestamp() - interval '5 minutes'
    order by v.received_at
    limit %(most)s
),
believed as materialized (
    select email_id, max(dispatcher.email_delivery_of(kind, bounce)) as delivery
    from read
    where doubt is distinct from 'impossible'
    group by email_id
    order by email_id
),
filled as (
    update dispatcher.email_log as e
    set delivery = greatest(e.delivery, b.delivery)
    from believed as b
    where e.email_id = b.email_id
        and (b.delivery > e.delivery or (e.delivery is null and b.delivery is not null))
),
-- The events of the last instant are read again, because not all of them may have been among these.
next as (
    select
        case
            when (select count(*) from read) = %(most)s
                then greatest((select max(received_at) from read), read_until + interval '1 microsecond')
            when lasts_until > clock_timestamp()
                then coalesce((select max(received_at) from read), read_until)
        end as read_until
    from position
),
moved as (
    update dispatcher.delivery_backfill as p
    set read_until = n.read_until
    from next as n
    where n.read_until is not null
),
ended as (
    delete from dispatcher.delivery_backfill
    where exists (select from next where read_until is null)
)
select read_until is null, (select count(*) from read)
from next;

-- name: find_proven
-- Marked emails that no worker has leased, oldest first: settle_proven settles them.
select email_id
from dispatcher.email_log
where proven_by is not null
    and status <> 'sent'
    and status in ('pending', 'waiting', 'failed', 'held', 'cancelled')
order by email_id
limit %(limit)s;

-- name: settle_proven
-- Settles marked emails by their events, and audits this. Leaves out emails that a worker has leased, because the
-- worker will record its own result. Usually, an email becomes `sent`, and is counted.
-- An email counts as dropped if the provider accepted the email, later rejected every recipient, and no event shows
-- that the email left the provider. A dropped email has not arrived: if it was held, it becomes failed; if it is
-- pending, it may be sent again.
-- Returns a row per email whose status changed. The queries before the update are materialized, because a plan for
-- small tables would execute them again for each email.
with free as (
    select email_id, status, proven_by, error_type
    from dispatcher.email_log
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
        and (proven_by is not null and status in ('pending', 'waiting', 'failed', 'held', 'cancelled')) is true
    order by email_id
    for no key update skip locked
),
content as materialized (
    select
        email_id,
        jsonb_array_length(coalesce(recipients -> 'to', '[]'))
        + jsonb_array_length(coalesce(recipients -> 'cc', '[]'))
        + jsonb_array_length(coalesce(recipients -> 'bcc', '[]')) as recipient_count
    from dispatcher.email_content
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
),
evidence as materialized (
    select
        email_id,
        bool_or(kind not in ('accepted', 'rejected')) as has_left,
        bool_or(kind = 'rejected' and address_hash is null) as is_rejected_whole,
        count(distinct address_hash) filter (where kind = 'rejected') as rejected_count,
        (array_agg(concat_ws(' ', code, detail) order by happened_at desc) filter (where kind = 'rejected'))[1] as words
    from dispatcher.email_event
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
        and doubt is distinct from 'impossible'
    group by email_id
),
judged as materialized (
    select
        f.email_id, f.status as previous_status, f.proven_by, v.words,
        coalesce(
            not v.has_left and (v.is_rejected_whole or v.rejected_count >= greatest(c.recipient_count, 1)), false
        ) as is_dropped
    from free as f
    left join evidence as v using (email_id)
    left join content as c using (email_id)
),
settled as (
    update dispatcher.email_log as e
    set
        status = case
            when not j.is_dropped then 'sent'
            when j.previous_status = 'held' then 'failed'
            else j.previous_status
        end,
        proven_by = case when not j.is_dropped then j.proven_by end,
        provider = case when not j.is_dropped or j.previous_status = 'held' then j.proven_by else e.provider end,
        sent_at = case when not j.is_dropped then clock_timestamp() end,
        settled_at = case when j.is_dropped and j.previous_status = 'held' then clock_timestamp() else e.settled_at end,
        wait_until = case when j.is_dropped then e.wait_until end,
        rescued_token = null,
        error_type = case
            when not j.is_dropped then null
            when j.previous_status = 'held' then 'dropped_by_provider'
            else e.error_type
        end,
        last_error = case
            when not j.is_dropped then null
            when j.previous_status = 'held' then concat_ws(': ', 'The provider accepted the email, then dropped it', j.words)
            else e.last_error
        end,
        publish_due_at = case when j.is_dropped and j.previous_status = 'pending' then clock_timestamp() end,
        dead_letter_due_at = case
            when not j.is_dropped then null
            when j.previous_status = 'held' and e.dead_letter_discarded_at is null then clock_timestamp()
            else e.dead_letter_due_at
        end
    from judged as j
    where e.email_id = any(array(select email_id from judged))
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and e.email_id = j.email_id
    returning
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.attempt_count, j.previous_status,
        j.proven_by, e.error_type
),
counted as (
    insert into dispatcher.email_hourly (hour, provider, outcome, slot, email_count)
    select date_trunc('hour', now(), 'UTC'), proven_by, 'accepted', 'evidence', count(*)
    from settled
    where status = 'sent'
    group by proven_by
    order by proven_by
    on conflict (hour, provider, outcome, slot) do update
    set email_count = email_hourly.email_count + excluded.email_count
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select
        'evidence:' || proven_by,
        'settle',
        case status
            when 'sent' then 'The provider reported an event, so it had accepted the email.'
            else 'The provider reported that it dropped the email.'
        end,
        email_id,
        jsonb_build_object('attempts', attempt_count, 'from', previous_status, 'to', status)
    from settled
    where status <> previous_status
),
announced as (
    insert into dispatcher.outgoing_event (kind, email_id, tenant_id, message_key, correlation_id, reason, provider)
    select status, email_id, tenant_id, message_key, correlation_id, error_type, proven_by
    from settled
    where (select is_on from dispatcher.outgoing_feed)
        and status <> previous_status
)
select email_id, correlation_id, proven_by, previous_status, status
from settled
where status <> previous_status;
