-- name: enqueue
-- Inserts the emails whose message key is new, and makes them due. The lane of an email is the first of these that is
-- set: the lane of the email or of its API key (`lane`), the lane of the rule for the sender's address, the lane of
-- the rule for the sender's domain, normal. The lane's policy is copied into the row, so that no later statement must
-- read it. The caller itself publishes the emails of direct_lanes, except the emails of relay_tenants. These emails are
-- due after publish_in_seconds; the relay then publishes those that the caller has not published. All other emails are
-- due immediately, and the commit notifies the relay unless the relay polls (see begin_polling). An email with
-- send_at in the future is waiting and not due; the relay wakes it (see timing.sql).
-- Returns the inserted ids, when each email is due (null: the email waits until send_at), and the lane of each email
-- that the caller itself publishes. Each email is due at a different instant, because the relay continues its scans
-- from an instant. If an id is missing in the result, its message key already existed (see find_by_key), or the email
-- has expired. An expired email is not inserted, and its key is not stored. So if find_by_key finds the key of an
-- expired email, the email was enqueued before.
-- The input is sorted by key, so that two callers with the same keys wait for each other and do not deadlock. Each
-- parameter has the values of one column; null: all are null. Ids, hashes and bodies are lists in binary (%b). The others
-- are array literals (%s), which psycopg sends several times as fast as a list. input and content are separate, so that
-- PostgreSQL does not copy the content with each step of the input.
-- hash_addresses is in a subquery, because the planner would call it, too, to estimate the number of its results.
-- The statement runs with the search_path of the application's session. So each call of an operator or function has
-- exactly the argument types that pg_catalog declares, and PostgreSQL finds no better match in another schema.
with input (
    email_id, tenant_id, message_key, payload_hash, on_uncertain, correlation_id, traceparent, send_at, expires_at,
    channel, lane, sender_address, sender_domain
) as (
    select *
    from unnest(
        %(email_id)b::uuid[], %(tenant_id)s::text[], %(message_key)s::text[], %(payload_hash)b::bytea[],
        %(on_uncertain)s::text[], %(correlation_id)s::text[], %(traceparent)s::text[], %(send_at)s::timestamptz[],
        %(expires_at)s::timestamptz[], %(channel)s::text[], %(lane)s::text[], %(sender_address)s::text[],
        %(sender_domain)s::text[]
    )
),
content as (
    select *
    from unnest(
        %(email_id)b::uuid[], %(sender)s::text[], %(recipients)s::jsonb[], %(subject)s::text[], %(text_body)b::text[],
        %(html_body)b::text[], %(template_id)s::text[], %(template_data)s::jsonb[], %(headers)s::jsonb[],
        %(tags)s::jsonb[], %(metadata)s::jsonb[], %(attachment_count)s::integer[], %(octets)s::integer[],
        %(ignore_suppression)s::boolean[]
    ) as c (
        email_id, sender, recipients, subject, text_body, html_body, template_id, template_data, headers, tags,
        metadata, attachment_count, octets, ignore_suppression
    )
),
recipient as (
    select (%(email_id)b::uuid[])[number] as email_id, *
    from unnest(
        %(email_numbers)s::smallint[], %(addresses)s::text[], (select dispatcher.hash_addresses(%(addresses)s::text[]))
    ) as r (number, address, address_hash)
),
rule as materialized (
    select sender, lane
    from dispatcher.lane_rule
),
{insertion}

-- name: enqueue_one
-- As enqueue, for one email, whose values are scalars. psycopg sends a scalar several times as fast as a list of one value,
-- and PostgreSQL puts the scalars in the place of input, content and recipient, so it starts fewer scans and joins. The
-- rules are found with their index; a batch reads all of them once.
with input (
    email_id, tenant_id, message_key, payload_hash, on_uncertain, correlation_id, traceparent, send_at, expires_at,
    channel, lane, sender_address, sender_domain
) as not materialized (
    select
        %(email_id)b::uuid, %(tenant_id)s, %(message_key)s, %(payload_hash)b::bytea, %(on_uncertain)s,
        %(correlation_id)s, %(traceparent)s, %(send_at)s::timestamptz, %(expires_at)s::timestamptz, %(channel)s,
        %(lane)s, %(sender_address)s, %(sender_domain)s
),
content as (
    select
        %(email_id)b::uuid as email_id, %(sender)s, %(recipients)s::jsonb, %(subject)s, %(text_body)s, %(html_body)s,
        %(template_id)s, %(template_data)s::jsonb, %(headers)s::jsonb, %(tags)s::jsonb, %(metadata)s::jsonb,
        %(attachment_count)s::integer, %(octets)s::integer, %(ignore_suppression)s::boolean
),
recipient as (
    select %(email_id)b::uuid as email_id, *
    from unnest(
        %(addresses)s::text[],
        (select dispatcher.hash_addresses(%(addresses)s::text[]))
    ) as r (address, address_hash)
),
rule as not materialized (
    select sender, lane
    from dispatcher.lane_rule
),
{insertion}

-- name: enqueue_attachments
-- Inserts the attachments of emails that `enqueue` has just inserted, and what is stored like an attachment, in the same
-- transaction. A row for each.
insert into dispatcher.email_attachment (email_id, position, filename, content_type, content, content_id, part)
select *
from unnest(
    %(email_ids)b::uuid[], %(positions)b::integer[], %(filenames)b::text[], %(content_types)b::text[],
    %(contents)b::bytea[], %(content_ids)s::text[], %(parts)s::text[]
)
returning true;

-- name: find_by_key
-- The emails that have these message keys. A row per key that exists and hash that is given for it: the hash, if it is
-- the stored one; otherwise null. The row of the stored hash is the last row of its key. Deletes the keys that have no
-- email: then the key has no row, and `enqueue` can insert it.
select tenant_id, message_key, email_id, payload_hash
from dispatcher.find_keys(%(tenant_ids)b::text[], %(message_keys)b::text[], %(payload_hashes)b::bytea[]);

-- part: insertion
-- What enqueue and enqueue_one do with input, content, recipient and rule.
claimed as (
    insert into dispatcher.email_idempotency (tenant_id, message_key, email_id, payload_hash)
    select tenant_id, message_key, email_id, payload_hash
    from input
    where expires_at is null
        or expires_at > clock_timestamp()
    on conflict do nothing
    returning email_id
),
-- The emails whose key is new, each with its lane and the lane's policy; without the content, which may be large.
accepted as (
    select
        email_id, tenant_id, message_key, correlation_id, traceparent, channel, expires_at, c.lane,
        coalesce(input.on_uncertain, p.on_uncertain) as on_uncertain, max_attempts, redeliver_seconds, is_direct, later_at,
        case
            when later_at is not null then null
            when is_direct
                then clock_timestamp() + %(publish_in_seconds)s::float8 * interval '1 second'
            else clock_timestamp()
        end as due_at
    from input
    join claimed using (email_id)
    left join rule as by_address on by_address.sender = sender_address
    left join rule as by_domain on by_domain.sender = sender_domain
    cross join lateral (
        select
            lane, lane = any(%(direct_lanes)s::text[]) and tenant_id <> all(%(relay_tenants)s::text[]) as is_direct,
            case when send_at > clock_timestamp() then send_at end as later_at
        from (select coalesce(input.lane, by_address.lane, by_domain.lane, 'normal') as lane offset 0) as l
    ) as c
    left join dispatcher.lane_policy as p on p.lane = c.lane
),
logged as (
    insert into dispatcher.email_log (
        email_id, tenant_id, message_key, on_uncertain, correlation_id, traceparent, channel, lane,
        max_attempts, redeliver_seconds, expires_at, status, wait_until, wait_reason, due_since, publish_due_at
    )
    select
        email_id, tenant_id, message_key, on_uncertain, correlation_id, traceparent, channel, lane,
        max_attempts, redeliver_seconds, expires_at,
        case when later_at is null then 'pending' else 'waiting' end,
        later_at,
        case when later_at is not null then 'scheduled' end,
        later_at,
        due_at
    from accepted
),
stored as (
    insert into dispatcher.email_content (
        email_id, sender, recipients, subject, text_body, html_body, template_id, template_data, headers, tags,
        metadata, attachment_count, octets, ignore_suppression
    )
    select content.*
    from content
    join claimed using (email_id)
),
-- The recipients of the emails: a hash of each address, without the address.
listed as (
    insert into dispatcher.email_recipient (email_id, address_hash, domain)
    -- A phone number has no domain.
    select
        email_id, address_hash,
        case when strpos(address, '@'::text) > 0 then split_part(address, '@'::text, -1) else '' end
    from recipient
    join claimed using (email_id)
)
select
    email_id,
    due_at,
    case when later_at is null and is_direct then lane end,
    case
        when later_at is null and not is_direct and not exists (select from dispatcher.relay_polls)
            then pg_notify('email_dispatcher_due'::text, ''::text)
    end,
    -- After the commit, the email must not be lost. So this commit waits for the disk, even if the session's setting
    -- says that commits do not wait.
    case
        when current_setting('synchronous_commit'::text) = 'off'::text
            then set_config('synchronous_commit'::text, 'on'::text, true)
    end
from accepted;
