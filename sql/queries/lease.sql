-- name: lease
-- Leases the emails that are pending and returns each with its content. For a missing id, see find_unleased. Leaves out
-- an email that an event proves to be sent (see events.sql), so that no second send begins; an email that has expired
-- (see timing.sql); and the emails of tenants that an operator paused (see put_back). A delivered message proves that the
-- email was published, so the same write clears the due mark.
-- lowest_id and highest_id let PostgreSQL prune partitions, here and below; a list of ids alone does not. The ids are
-- sorted, so that all batches lock rows in one order.
-- PostgreSQL keeps the plan of this and of all other worker statements (see keep_plans), so no plan may depend on the
-- contents of the tables at the time of planning. A plan that started from the range of ids would read, for each email
-- of a batch, every row between the oldest and the newest email. So emails are looked up with `= any`, here and below.
-- The other conditions are wrapped in `… is true`, so neither a join nor a different index can start from them.
-- A statement that locks or changes rows of a partitioned table finds them by `= any`, never laterally, by a join or by
-- `= (select …)`, because these prune partitions at run time. If another transaction has just changed such a row,
-- PostgreSQL 18 before commit 1b5dd3a (October 2026) reads freed memory and crashes. test_plans.py checks every
-- statement.
-- If the content is larger than most_octets or has attachments, only its size is returned: the worker reads the content
-- just before it sends the email (see content.sql). The size is 0 if the content is included, and negative if it is
-- unknown. PostgreSQL reads the size of an out-of-line value from its pointer, without reading the value.
-- The last five columns: the provider to which the email is pinned, because it may have accepted the email under an
-- idempotency key; how many seconds ago at most; in how many seconds the email expires; the tenant, whose suppressed
-- recipients get no email; and the email's own limits of retries, as an array, because they are rare: the most attempts,
-- for how many seconds a redelivery may begin, and how many redeliveries were made. All but the tenant are null if they do
-- not apply.
with leased as (
    update dispatcher.email_log as e
    set
        status = 'sending',
        lease_token = e.lease_token + 1,
        attempt_count = e.attempt_count + 1,
        locked_by = %(worker)s,
        locked_until = clock_timestamp() + %(lease_seconds)s * interval '1 second',
        leased_at = clock_timestamp(),
        published_at = coalesce(e.published_at, clock_timestamp()),
        publish_due_at = null
    where e.email_id = any(%(email_ids)b)
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and (
            (e.email_id, e.message_key, e.status) in (
                select w.email_id, w.message_key, 'pending'
                from unnest(%(email_ids)b::uuid[], %(message_keys)s::text[]) as w (email_id, message_key)
            )
        ) is true
        and e.proven_by is null
        and e.tenant_id <> all(%(paused_tenants)s::text[])
        and (e.expires_at is null or e.expires_at > clock_timestamp())
        and e.locked_until < now()
    returning
        e.email_id, e.lease_token, e.attempt_count, e.on_uncertain, e.correlation_id, e.attempt_base, e.traceparent,
        coalesce(e.due_since, e.created_at) as due_since, e.provider, e.pinned_at, e.expires_at, e.tenant_id,
        e.created_at, e.max_attempts, e.redeliver_seconds, e.redelivery_count, e.channel
)
select
    e.email_id, e.lease_token, e.attempt_count, e.on_uncertain, e.correlation_id, e.attempt_base,
    e.traceparent, e.due_since,
    c.sender, c.recipients, c.subject,
    case when c.octets_apart = 0 then c.text_body end,
    case when c.octets_apart = 0 then c.html_body end,
    c.template_id,
    case when c.octets_apart = 0 then c.template_data end,
    c.headers, c.tags, e.channel, c.octets_apart,
    case when e.pinned_at is not null then e.provider end,
    extract(epoch from clock_timestamp() - e.pinned_at)::double precision,
    extract(epoch from e.expires_at - clock_timestamp())::double precision,
    e.tenant_id,
    case
        when e.max_attempts is not null or coalesce(e.redeliver_seconds, %(redeliver_seconds)s) > 0 then array[
            e.max_attempts,
            extract(
                epoch from least(
                    coalesce(e.due_since, e.created_at)
                    + coalesce(e.redeliver_seconds, %(redeliver_seconds)s) * interval '1 second',
                    e.expires_at
                ) - clock_timestamp()
            ),
            e.redelivery_count
        ]::double precision[]
    end
from leased as e
left join lateral (
    select
        sender, recipients, subject, text_body, html_body, template_id, template_data, headers, tags,
        case
            when attachment_count = 0 and octets <= %(most_octets)s then 0
            when octets is not null then greatest(octets, 1)
            when attachment_count > 0 then -1
            when coalesce(octet_length(text_body), 0) + coalesce(octet_length(html_body), 0) <= %(most_octets)s then 0
            else coalesce(octet_length(text_body), 0) + coalesce(octet_length(html_body), 0)
        end as octets_apart
    from dispatcher.email_content
    where email_id = e.email_id
        and email_id between %(lowest_id)s and %(highest_id)s
    offset 0
) as c on true;

-- name: lease_without_content
-- As lease, for one email that PostgreSQL could not lease with its content. Reads as few columns as possible.
update dispatcher.email_log as e
set
    status = 'sending',
    lease_token = e.lease_token + 1,
    attempt_count = e.attempt_count + 1,
    locked_by = %(worker)s,
    locked_until = clock_timestamp() + %(lease_seconds)s * interval '1 second',
    leased_at = clock_timestamp(),
    published_at = coalesce(e.published_at, clock_timestamp()),
    publish_due_at = null
where e.email_id = %(email_id)s
    and e.message_key = %(message_key)s
    and e.status = 'pending'
    and e.proven_by is null
    and e.tenant_id <> all(%(paused_tenants)s::text[])
    and (e.expires_at is null or e.expires_at > clock_timestamp())
    and e.locked_until < now()
returning
    e.lease_token, e.attempt_count, e.on_uncertain, e.attempt_base,
    case when e.pinned_at is not null then e.provider end,
    extract(epoch from clock_timestamp() - e.pinned_at)::double precision,
    extract(epoch from e.expires_at - clock_timestamp())::double precision,
    e.tenant_id,
    case
        when e.max_attempts is not null or coalesce(e.redeliver_seconds, %(redeliver_seconds)s) > 0 then array[
            e.max_attempts,
            extract(
                epoch from least(
                    coalesce(e.due_since, e.created_at)
                    + coalesce(e.redeliver_seconds, %(redeliver_seconds)s) * interval '1 second',
                    e.expires_at
                ) - clock_timestamp()
            ),
            e.redelivery_count
        ]::double precision[]
    end;

-- name: find_unleased
-- The status of emails that could not be leased. Also returns the token of the lease that this worker has, or of the
-- lease that a recovery took from it if the email has not changed since and was not discarded; otherwise null. Last
-- column: the lease statement leaves the email out although it is pending, because the relay finishes it: an event proves
-- it, or it has expired. A missing id has no row.
select
    email_id, message_key, status,
    case
        when status = 'sending' and locked_by = %(worker)s then lease_token
        when status = 'held'
            and rescued_from = %(worker)s
            and lease_token = rescued_token + 1
            and dead_letter_discarded_at is null
            then rescued_token
    end,
    proven_by is not null or coalesce(expires_at <= clock_timestamp(), false)
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s;

-- name: renew
-- Extends leases that this worker still owns. Never shortens a lease, because a deferral may just have extended it
-- beyond the wait before the retry. An expired lease is extended, too, unless its email was already recovered. If an id
-- is missing in the result, the worker must not begin an attempt: it has lost its lease, or an event proves that a
-- provider accepted the email. A proven email keeps its lease, because it may be on the wire.
-- The end always changes, even if only by a microsecond. Recovery identifies an expired lease by its end, and must
-- detect the renewal even if the clock was set back.
with renewed as (
    update dispatcher.email_log as e
    set locked_until = greatest(
        e.locked_until + interval '1 microsecond',
        clock_timestamp() + %(lease_seconds)s * interval '1 second'
    )
    where e.email_id = any(%(email_ids)s)
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and (
            (e.email_id, e.lease_token, e.status) in (
                select w.email_id, w.lease_token, 'sending'
                from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[]) as w (email_id, lease_token)
            )
        ) is true
    returning e.email_id, e.proven_by
)
select email_id
from renewed
where proven_by is null;

-- name: release
-- Releases leases without an attempt: the emails become pending and due, and the attempt is not counted. They are due
-- after away_seconds, for example if their provider is unavailable while others work, or if a worker has no memory for
-- them. If an id is missing in the result, the worker has lost its lease.
update dispatcher.email_log as e
set
    status = 'pending',
    attempt_count = e.attempt_count - 1,
    locked_by = null,
    locked_until = 'epoch',
    publish_due_at = clock_timestamp() + w.away_seconds * interval '1 second'
from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[], %(away_seconds)s::double precision[])
    as w (email_id, lease_token, away_seconds)
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and e.email_id = w.email_id
    and (e.lease_token = w.lease_token and e.status = 'sending') is true
returning e.email_id;

-- name: replay_dead_letters
-- Replays emails whose dead letters an operator moved back to the send queue. An email is replayed if the dead letter
-- matches its current failure (see ops/dead_letters.py), the email cannot have arrived and has not expired, it has
-- content, and its dead letter was moved back fewer than most_times times; a higher number means that a program moves it. Returns one verdict
-- per email: replayed, refused (an operator must use a command), or stale. An id is missing if another transaction has
-- locked its row.
with free as (
    select email_id, status, attempt_count, was_uncertain, coalesce(expires_at <= clock_timestamp(), false) as is_expired
    from dispatcher.email_log
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
    for update skip locked
),
candidate as (
    select
        e.email_id,
        (e.email_id, e.attempt_count) in (
            select w.email_id, w.attempts
            from unnest(%(email_ids)s::uuid[], %(attempts)s::integer[]) as w (email_id, attempts)
        )
        and e.status in ('failed', 'held') as is_current,
        e.status = 'held' or e.was_uncertain as may_have_arrived,
        e.is_expired,
        e.email_id in (
            select c.email_id
            from dispatcher.email_content as c
            where c.email_id = any(%(email_ids)s)
                and c.email_id between %(lowest_id)s and %(highest_id)s
        ) as has_content,
        (
            select count(*)
            from dispatcher.operator_audit as a
            where a.email_id = e.email_id
                and a.action = 'replay_letter'
        ) as times
    from free as e
),
judged as (
    select
        email_id,
        case
            when not is_current then 'stale'
            when may_have_arrived or is_expired or not has_content or times >= %(most_times)s then 'refused'
            else 'replayed'
        end as verdict
    from candidate
),
replayed as (
    update dispatcher.email_log as e
    set
        status = 'pending',
        attempt_base = e.attempt_count,
        due_since = clock_timestamp(),
        redelivery_count = 0,
        crash_count = 0,
        pinned_at = null,
        locked_by = null,
        locked_until = 'epoch',
        published_at = null,
        publish_due_at = clock_timestamp(),
        dead_letter_due_at = null,
        dead_letter_discarded_at = null
    where e.email_id = any(array(select email_id from judged where verdict = 'replayed'))
        and e.email_id between %(lowest_id)s and %(highest_id)s
    returning e.email_id, e.attempt_count
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select
        %(worker)s, 'replay_letter', 'Its dead letter was put back on the send queue.', email_id,
        jsonb_build_object('attempts', attempt_count)
    from replayed
)
select email_id, verdict, pg_notify('email_dispatcher_due', '')
from judged;
