-- name: lease
-- Leases the emails that are pending, and returns each email with its content. If an id is missing in the result,
-- find_unleased shows why. Leaves out an email that an event proves to be sent (see events.sql), so that no second send
-- begins; an email that has expired (see timing.sql); and the emails of tenants that an operator paused (see put_back).
-- A worker leases an email after it has received the email's message. This proves that the email was published, so the
-- same write clears the due mark.
-- lowest_id and highest_id let PostgreSQL prune partitions, here and below; a list of ids alone does not. The ids are
-- sorted, so that all batches lock rows in one order. In sorted ids, width_bucket returns an id's position, which is the
-- position of the email's value in the other arrays; a join takes longer.
-- PostgreSQL keeps the plan of this and of all other worker statements (see keep_plans), so no plan may depend on the
-- contents of the tables at the time of planning. A plan that started from the range of ids would read, for each email
-- of a batch, every row between the oldest and the newest email. So emails are looked up with `= any`, here and below.
-- The other conditions are wrapped in `… is true`, so neither a join nor a different index can start from them.
-- A statement that locks or changes rows of a partitioned table finds them by `= any`, never laterally, by a join or by
-- `= (select …)`, because these prune partitions at run time. If another transaction has just changed such a row,
-- PostgreSQL 18 before commit 1b5dd3a (October 2026) reads freed memory and crashes. test_plans.py checks every
-- statement.
-- The content is found by a list of one id: by a single id, PostgreSQL would prune partitions again for each email.
-- If the content is larger than most_octets or has attachments, only its size is returned: the worker reads the content
-- just before it sends the email (see content.sql). The size is 0 if the content is included, and negative if it is
-- unknown. PostgreSQL reads the size of an out-of-line value from its pointer, without reading the value.
-- The Date header is the time from which the email could be sent (due_since). If the lease begins more than two hours
-- later, for example after a pause, the Date header is the begin of the lease. But every attempt that may have been
-- accepted since due_since, and every attempt after it, has one Date, so that the recipient's server can recognise the
-- second copy: leased_at keeps its value while an earlier attempt may have been accepted (see decision 0060).
-- The last seven columns are, in order:
-- 1. The provider to which the email is pinned: it may have accepted the email under an idempotency key. Null: no pin.
-- 2. The seconds since the email was pinned. Null: no pin.
-- 3. The seconds until the email expires. Null: the email never expires.
-- 4. The tenant, whose suppressed recipients get no email.
-- 5. The topic: entries for this topic suppress its recipients, too. Null: none.
-- 6. The email's own retry limits: the most attempts, for how many seconds a redelivery may begin, and how many
--    redeliveries were made. They are one array, because few emails have limits. Null: there are none, and redelivery
--    is off.
-- 7. due_since, if it is not the time in the Date header. Null: it is.
with leased as (
    update dispatcher.email_log as e
    set
        status = 'sending',
        lease_token = e.lease_token + 1,
        attempt_count = e.attempt_count + 1,
        locked_by = %(worker)s,
        locked_until = clock_timestamp() + %(lease_seconds)s * interval '1 second',
        leased_at = case
            when e.was_uncertain and e.leased_at >= coalesce(e.due_since, e.created_at) then e.leased_at
            else clock_timestamp()
        end,
        published_at = coalesce(e.published_at, clock_timestamp()),
        publish_due_at = null
    where e.email_id = any(%(email_ids)b)
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and (
            e.status = 'pending'
            and e.message_key = (%(message_keys)s::text[])[width_bucket(e.email_id, %(email_ids)b::uuid[])]
        ) is true
        and e.proven_by is null
        and e.tenant_id <> all(%(paused_tenants)s::text[])
        and (e.expires_at is null or e.expires_at > clock_timestamp())
        and e.locked_until < now()
    returning
        e.email_id, e.lease_token, e.attempt_count, e.on_uncertain, e.correlation_id, e.attempt_base, e.traceparent,
        coalesce(e.due_since, e.created_at) as due_since, e.provider, e.pinned_at, e.expires_at, e.tenant_id,
        e.topic, e.leased_at, e.max_attempts, e.redeliver_seconds, e.redelivery_count, e.channel, array[e.email_id] as ids
)
select
    e.email_id, e.lease_token, e.attempt_count, e.on_uncertain, e.correlation_id, e.attempt_base,
    e.traceparent,
    case when e.leased_at > e.due_since + interval '2 hours' then e.leased_at else e.due_since end,
    c.sender, c.recipients, c.subject,
    case when c.octets_apart = 0 then c.text_body end,
    case when c.octets_apart = 0 then c.html_body end,
    c.template_id,
    case when c.octets_apart = 0 then c.template_data end,
    c.headers, c.tags, e.channel, c.octets_apart,
    case when e.pinned_at is not null then e.provider end,
    extract(epoch from clock_timestamp() - e.pinned_at)::double precision,
    extract(epoch from e.expires_at - clock_timestamp())::double precision,
    e.tenant_id, e.topic,
    case
        when e.max_attempts is not null or coalesce(e.redeliver_seconds, %(redeliver_seconds)s) > 0 then array[
            e.max_attempts,
            extract(
                epoch from least(
                    e.due_since
                    + coalesce(e.redeliver_seconds, %(redeliver_seconds)s) * interval '1 second',
                    e.expires_at
                ) - clock_timestamp()
            ),
            e.redelivery_count
        ]::double precision[]
    end,
    case when e.leased_at > e.due_since + interval '2 hours' then e.due_since end
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
    where email_id = any(e.ids)
        and email_id between %(lowest_id)s and %(highest_id)s
    offset 0
) as c on true;

-- name: lease_without_content
-- As lease, for one email that PostgreSQL could not lease with its content. Reads as few columns as possible, because a
-- column may be damaged.
update dispatcher.email_log as e
set
    status = 'sending',
    lease_token = e.lease_token + 1,
    attempt_count = e.attempt_count + 1,
    locked_by = %(worker)s,
    locked_until = clock_timestamp() + %(lease_seconds)s * interval '1 second',
    leased_at = case
        when e.was_uncertain and e.leased_at >= coalesce(e.due_since, e.created_at) then e.leased_at
        else clock_timestamp()
    end,
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
    e.tenant_id, e.topic,
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

-- name: find_recipient_outcomes
-- The recipients who need no further attempt. Leaves out emails that were never delivered to only some recipients.
select email_id, recipient_outcomes
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and (recipient_outcomes is not null) is true;

-- name: find_unleased
-- The status of emails that could not be leased. Also returns a token. If this worker has a lease of the email, it is
-- the token of this lease. If a recovery took the lease from this worker, and the email has not changed since and was
-- not discarded, it is the token of the lost lease. Otherwise, the token is null. The last column is true if no worker
-- may lease the email, even if it is pending: an event proves that the email was sent, or the email has expired. The
-- relay settles or cancels such an email. If an id is missing in the result, there is no such email.
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
-- Extends leases that this worker still owns. Never shortens a lease, because a deferral may just have extended the
-- lease beyond the wait before the retry. Also extends an expired lease, unless the email was already recovered. If an
-- id is missing in the result, the worker must not begin an attempt: the worker has lost the lease, or an event proves
-- that a provider accepted the email. A proven email keeps its lease, because the email may be on the wire.
-- The end of the lease always changes, even if only by a microsecond. Recovery identifies an expired lease by its end,
-- and must detect the renewal even if the clock was set back.
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
-- Releases leases without an attempt. The emails become pending and due, and the attempt is not counted. An email is
-- due after its away_seconds, for example because its provider is unavailable while other providers work, or because
-- the worker has no memory for the email. If an id is missing in the result, the worker has lost the lease.
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
