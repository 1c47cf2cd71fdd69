-- Find an email by its recipient, and know when each thing happened to it.

-- HMAC-SHA-256 (RFC 2104) needs the key as two blocks of 64 bytes. Stored, so that a statement that hashes addresses
-- need not make them. `pad` is 54 (0x36) for the inner block and 92 (0x5c) for the outer one.
create function address_key_block(address_key bytea, pad integer) returns bytea
language sql immutable strict parallel safe
begin atomic
    select string_agg(set_byte('\x00'::bytea, 0, get_byte(k.padded, i) # $2), ''::bytea order by i)
    from (
        select hashed.key || decode(repeat('00', 64 - octet_length(hashed.key)), 'hex') as padded
        from (select case when octet_length($1) > 64 then sha256($1) else $1 end as key) as hashed
    ) as k
    cross join generate_series(0, 63) as i;
end;

alter table dispatcher_database
    add column address_key_inner bytea not null generated always as (address_key_block(address_key, 54)) stored,
    add column address_key_outer bytea not null generated always as (address_key_block(address_key, 92)) stored,
    add column recipients_since timestamptz not null default clock_timestamp();

comment on column dispatcher_database.recipients_since is
    'Emails that were enqueued since then are found by their recipients. Older emails have no rows in email_recipient.';

-- The first 6 bytes of the hash of each address, as `AddressHasher.hash` in store/address_hashes.py computes it. Among
-- 10,000,000 emails to one domain, a look-up finds an email of another recipient once in 28,000,000 look-ups. The
-- addresses are already normalised. A role that enqueues may call the function, but cannot read the key: with the key,
-- an application could forge links to unsubscribe. (It cannot do so with this function: the text that such a link signs
-- begins with a NUL.)
create function hash_addresses(addresses text[]) returns bytea[]
language plpgsql stable strict parallel safe security definer
set search_path from current
as $$
declare
    inner_block bytea;
    outer_block bytea;
begin
    select address_key_inner, address_key_outer into inner_block, outer_block from dispatcher_database;
    return array(
        select substring(sha256(outer_block || sha256(inner_block || convert_to(address, 'UTF8'))) from 1 for 6)
        from unnest(addresses) as address
    );
end
$$;

revoke execute on function hash_addresses(text[]) from public;

create table email_recipient (
    email_id uuid not null,
    address_hash bytea not null,
    domain text collate "C" not null
) partition by range (email_id);

comment on table email_recipient is 'Who each email goes to, without addresses. Kept as long as the row in email_log.';
comment on column email_recipient.address_hash is 'The first 6 bytes of the HMAC of the address with dispatcher_database.address_key.';
comment on column email_recipient.domain is 'In lower case, an internationalized domain as A-labels.';

-- A summary of each 16 pages (about 1,700 rows): the range of the ids, and Bloom filters of the addresses and of the
-- domains. An enqueue only appends a row; PostgreSQL summarises pages when they are full. A B-tree would cost each
-- enqueue about as much WAL as the row, and a full-page image per row when emails are few. See find_recipients.
create index email_recipient_summary on email_recipient using brin (
    email_id,
    address_hash bytea_bloom_ops (n_distinct_per_range = 2000, false_positive_rate = 0.01),
    domain text_bloom_ops (n_distinct_per_range = 1000, false_positive_rate = 0.01)
) with (pages_per_range = 16, autosummarize = on);

create table email_recipient_default partition of email_recipient default;

-- The newest `most` emails, between two ids, with a recipient in a domain, and with this address unless wanted_hash is
-- null. Reads from the newest email back, in windows that double, and stops when it has found enough. So it reads few
-- pages for a rare recipient, which few summaries contain, and for a frequent one, of which the first windows have enough.
create function find_recipients(wanted_domain text, wanted_hash bytea, below_id uuid, from_id uuid, most bigint)
returns setof uuid
language plpgsql stable rows 50
set search_path from current
-- PostgreSQL has no statistics of Bloom filters, and estimates that each page matches.
set enable_seqscan = off
set jit = off
as $$
declare
    oldest uuid;
    newest uuid;
    upper_id uuid := below_id;
    lower_id uuid;
    lower_at timestamptz;
    width interval := '1 hour';
    wanted bigint := most;
    found bigint;
begin
    if wanted_domain is null then
        return;
    end if;
    select email_id into oldest from email_log where email_id >= from_id order by email_id limit 1;
    select email_id into newest from email_log where email_id < below_id order by email_id desc limit 1;
    lower_at := to_timestamp(('x' || left(replace(newest::text, '-', ''), 12))::bit(48)::bigint / 1000.0);
    while upper_id > oldest loop
        lower_at := lower_at - width;
        lower_id := greatest(oldest, email_id_lowest_at(lower_at));
        return query execute
            'select distinct email_id from email_recipient where email_id < $1 and email_id >= $2 and domain = $3'
            || case when wanted_hash is null then '' else ' and address_hash = $4' end
            || ' order by email_id desc limit $5'
        using upper_id, lower_id, wanted_domain, wanted_hash, wanted;
        get diagnostics found = row_count;
        wanted := wanted - found;
        exit when wanted <= 0;
        upper_id := lower_id;
        width := 2 * width;
    end loop;
end
$$;

-- Instants. Null: it has not happened, or the release before did it.
alter table email_log
    add column leased_at timestamptz,
    add column settled_at timestamptz,
    add column dead_lettered_at timestamptz;

comment on column email_log.leased_at is 'When a worker last leased it.';
comment on column email_log.settled_at is 'When it last became failed, held or cancelled.';
comment on column email_log.dead_lettered_at is 'When RabbitMQ last confirmed its dead letter.';

create index email_log_correlation on email_log (correlation_id, email_id) where correlation_id is not null;

-- As in 0021, and now for the recipients, too.
create or replace function email_partitions_make(at timestamptz, weeks_ahead integer) returns setof text
language plpgsql
security definer
set search_path from current
as $$
declare
    parent text;
    week timestamp;
    name text;
begin
    perform pg_advisory_xact_lock(hashtext('email_partitions_make'));
    foreach parent in array array[
        'email_log', 'email_content', 'email_attachment', 'email_attempt', 'email_event', 'email_recipient'
    ] loop
        for step in 0..weeks_ahead loop
            week := date_trunc('week', at at time zone 'UTC') + step * interval '1 week';
            name := parent || to_char(week, '"_p"YYYYMMDD');
            if to_regclass(quote_ident(name)) is null then
                perform email_partition_make(
                    parent,
                    name,
                    email_id_lowest_at(week at time zone 'UTC'),
                    email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
                );
                return next name;
            end if;
        end loop;
    end loop;
end
$$;

-- As in 0022, and now for the recipients, too.
create or replace function email_partitions_ended(parent text, before_at timestamptz)
returns table (partition text, from_id uuid, until_id uuid)
language sql stable
set search_path from current
as $$
    select
        name,
        email_id_lowest_at(week at time zone 'UTC'),
        email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
    from (
        select c.relname::text as name, to_date(substring(c.relname from '_p(\d{8})$'), 'YYYYMMDD')::timestamp as week
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = to_regclass(quote_ident(parent))
            and parent in (
                'email_log', 'email_content', 'email_attachment', 'email_attempt', 'email_event', 'email_recipient'
            )
    ) as weekly
    where (week + interval '1 week') at time zone 'UTC' <= before_at
    order by name
$$;

-- The weeks of the emails that are there already: an application whose clock is behind may still enqueue into the last.
do $$
declare
    week timestamp;
    name text;
begin
    for week in
        select to_date(substring(c.relname from '_p(\d{8})$'), 'YYYYMMDD')::timestamp
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = 'email_log'::regclass
            and c.relname ~ '_p\d{8}$'
    loop
        name := to_char(week, '"email_recipient_p"YYYYMMDD');
        if to_regclass(name) is null then
            perform email_partition_make(
                'email_recipient',
                name,
                email_id_lowest_at(week at time zone 'UTC'),
                email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
            );
        end if;
    end loop;
end
$$;

-- The domains of an email's recipients, without duplicates; of older emails, too. Empty: the content was deleted. For
-- roles that may not read addresses.
create function recipient_domains(wanted_email_id uuid) returns text[]
language plpgsql stable strict parallel safe security definer
set search_path from current
as $$
begin
    return array(
        select distinct rtrim(lower(split_part(address.text, '@', -1)), '> ')
        from email_content as c
        cross join lateral jsonb_array_elements_text(
            coalesce(c.recipients -> 'to', '[]')
            || coalesce(c.recipients -> 'cc', '[]')
            || coalesce(c.recipients -> 'bcc', '[]')
        ) as address (text)
        where c.email_id = wanted_email_id
            and address.text like '%@%'
    );
end
$$;

revoke execute on function recipient_domains(uuid) from public;

-- As in 0018, with a tag. The function with nine parameters stays for the release before.
create function find_dead_emails(
    selected_status text,
    selected_error_type text,
    selected_provider text,
    selected_tenant_id text,
    selected_text text,
    older_than_seconds double precision,
    newer_than_seconds double precision,
    selected_ids uuid[],
    selected_discarded boolean,
    selected_tag text
) returns table (
    email_id uuid,
    tenant_id text,
    message_key text,
    correlation_id text,
    status text,
    error_type text,
    last_error text,
    attempt_count integer,
    provider text,
    created_at timestamptz,
    was_uncertain boolean,
    dead_letter_due_at timestamptz,
    dead_letter_discarded_at timestamptz
)
language sql stable
begin atomic
    select
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.error_type, e.last_error, e.attempt_count,
        e.provider, e.created_at, e.was_uncertain, e.dead_letter_due_at, e.dead_letter_discarded_at
    from email_log as e
    where e.status in ('failed', 'held')
        and (selected_status is null or e.status = selected_status)
        and (selected_error_type is null or e.error_type = selected_error_type)
        and (selected_provider is null or e.provider = selected_provider)
        and (selected_tenant_id is null or e.tenant_id = selected_tenant_id)
        and (selected_text is null or position(lower(selected_text) in lower(e.last_error)) > 0)
        and (older_than_seconds is null or e.created_at < now() - older_than_seconds * interval '1 second')
        and (newer_than_seconds is null or e.created_at > now() - newer_than_seconds * interval '1 second')
        and (selected_ids is null or e.email_id = any(selected_ids))
        and (selected_discarded is null or (e.dead_letter_discarded_at is not null) = selected_discarded)
        and (
            selected_tag is null
            or (select c.tags ? selected_tag from email_content as c where c.email_id = e.email_id)
        );
end;

comment on function find_dead_emails(
    text, text, text, text, text, double precision, double precision, uuid[], boolean, text
) is 'Failed and held emails by a filter; an age counts from when the email was enqueued. A tag is found while the content is kept.';

-- As in 0023: the roles that may lease emails, enqueue them, or read the history get their rights here.
do $$
declare
    grantee text;
begin
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_log'::regclass
            and acl.privilege_type = 'UPDATE'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant select, insert, delete on email_recipient to %s', grantee);
    end loop;
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_log'::regclass
            and acl.privilege_type = 'INSERT'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant insert on email_recipient to %s', grantee);
        execute format('grant execute on function hash_addresses(text[]) to %s', grantee);
    end loop;
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_event'::regclass
            and acl.privilege_type = 'SELECT'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant select on email_recipient to %s', grantee);
        execute format('grant select (recipients_since) on dispatcher_database to %s', grantee);
        execute format('grant select (email_id, tags) on email_content to %s', grantee);
        execute format('grant execute on function hash_addresses(text[]), recipient_domains(uuid) to %s', grantee);
    end loop;
end
$$;
