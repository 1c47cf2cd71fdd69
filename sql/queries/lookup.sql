-- name: hash_address
-- The hash of a normalised address, as it is stored in email_recipient. One row.
select (dispatcher.hash_addresses(array[%(address)s]))[1];

-- name: find_held_recipients
-- Those of the given normalised addresses that are recipients of an email; all of them if its recipients were deleted.
with held as materialized (
    select address_hash
    from dispatcher.email_recipient
    where email_id = %(email_id)s
)
select address
from unnest(%(addresses)s::text[], dispatcher.hash_addresses(%(addresses)s::text[])) as given (address, address_hash)
where address_hash in (select address_hash from held)
    or not exists (select from held);

-- name: find_recipients_since
-- The time since which emails can be found by their recipients, and whether there is an older email. One row.
select
    recipients_since,
    exists (select from dispatcher.email_log where email_id < dispatcher.email_id_lowest_at(recipients_since))
from dispatcher.dispatcher_database;

-- part: found_email
email_id, tenant_id, message_key, status, delivery::text, lane, attempt_count, correlation_id, error_type, last_error,
provider, provider_message_id, created_at, sent_at, settled_at, coalesce(channel, 'email') as channel,
due_since as send_at, expires_at

-- part: read_next
-- The end of a query for the next emails that a page reads: their ids, order and number.
email_id < %(below_id)s and email_id >= %(from_id)s
order by email_id desc
limit %(examined)s

-- name: find_emails
-- A page of emails, newest first, between two ids. Reads at most `examined` emails, whatever the filters, so each page
-- takes about the same time. `start` names the filter by which these emails are read; of the branches of `examined`,
-- PostgreSQL executes only the branch for this start. The last column is the id below which the next page starts; null:
-- this is the last page. This column is returned even if no email matches.
with examined as (
    (
        select {found_email}
        from dispatcher.email_log
        where %(start)s = 'all'
            and {read_next}
    )
    union all
    (
        select {found_email}
        from dispatcher.email_log
        where %(start)s = 'status'
            and status = %(status)s
            and status <> 'sent'
            and {read_next}
    )
    union all
    (
        select {found_email}
        from dispatcher.email_log
        where %(start)s = 'correlation_id'
            and correlation_id = %(correlation_id)s
            and {read_next}
    )
    union all
    select e.*
    from (
        select dispatcher.find_recipients(
            %(recipient_domain)s, %(address_hash)s, %(below_id)s, %(from_id)s, %(examined)s
        )
        union all
        select dispatcher.find_metadata(%(wanted_metadata)s::jsonb, %(below_id)s, %(from_id)s, %(examined)s)
    ) as f (email_id)
    cross join lateral (
        select {found_email}
        from dispatcher.email_log
        where email_id = f.email_id
        offset 0
    ) as e
    union all
    select e.*
    from (
        select distinct email_id
        from dispatcher.email_event
        where %(start)s = 'delivery'
            and kind = %(event_kind)s
            and kind in ('deferred', 'bounced', 'complained', 'rejected')
            and {read_next}
    ) as v
    cross join lateral (
        select {found_email}
        from dispatcher.email_log
        where email_id = v.email_id
        offset 0
    ) as e
),
bound as (
    select case when count(*) >= %(examined)s then min(email_id::text)::uuid end as lowest_id
    from examined
),
wanted as (
    select *
    from examined
    where (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s)
        and (%(status)s::text is null or status = %(status)s)
        and (%(deliveries)s::text[] is null or coalesce(delivery, 'none') = any(%(deliveries)s))
        and (%(lane)s::text is null or lane = %(lane)s)
        and (%(channel)s::text is null or channel = %(channel)s)
        and (%(error_type)s::text is null or error_type = %(error_type)s)
        and (
            %(text)s::text is null
            or (error_type is not null and position(lower(%(text)s) in lower(last_error)) > 0)
        )
        and (%(provider)s::text is null or provider = %(provider)s)
        and (%(correlation_id)s::text is null or correlation_id = %(correlation_id)s)
    order by email_id desc
    limit %(limit)s
)
select w.*, bound.lowest_id
from bound
left join wanted as w on true
order by w.email_id desc;

-- name: list_recipient_partitions
-- The names of the partitions that contain recipients.
select c.relname
from pg_inherits as i
join pg_class as c on c.oid = i.inhrelid
where i.inhparent = 'dispatcher.email_recipient'::regclass
order by c.relname;

-- name: summarize_recipient_partition
-- Creates missing summaries of a partition, and replaces unfinished ones. Returns one row: whether there were any.
select dispatcher.email_recipient_summarize(%(partition)s);

-- name: find_with_domain
-- The given emails that have a recipient at a domain.
select email_id
from dispatcher.email_recipient
where domain = %(domain)s
    and {is_given};

-- name: find_with_tag
-- The given emails that have a tag. Leaves out emails whose content was deleted.
select email_id
from dispatcher.email_content
where {is_given}
    and tags ? %(tag)s;

-- name: find_with_metadata
-- The given emails whose metadata contains this. Leaves out emails whose content was deleted.
select email_id
from dispatcher.email_content
where {is_given}
    and metadata @> %(metadata)s::jsonb;

-- name: find_from
-- The given emails whose sender, in lower case, is one of the given addresses or ends with one of the given domains
-- (`@example.com`), with or without a display name. Leaves out emails whose content was deleted.
select c.email_id
from dispatcher.email_content as c
where {is_given}
    and exists (
        select
        from unnest(%(senders)s::text[]) as s (text)
        where lower(c.sender) = s.text
            or right(lower(c.sender), length(s.text) + 2) = '<' || s.text || '>'
            or (
                left(s.text, 1) = '@'
                and rtrim(right(rtrim(lower(c.sender), '>'), length(s.text))) = s.text
            )
    );
