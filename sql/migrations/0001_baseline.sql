-- `init` executes this file with our schema as the search_path, so no name has a schema. Sessions that call a function
-- later have another search_path. So a function that reads tables either stores ours (`set search_path from current`), or
-- has a body that PostgreSQL parses when it creates the function (`begin atomic`). Only the roles of `dispatcher topology
-- grants` may call a function that changes or reveals something with its owner's rights (`security definer`).
--
-- A text in a unique key has the collation "C", because the order of every other collation may change with the operating
-- system's C library. Then an index would no longer find some of its rows, and a repeated message key would create a
-- second email (docs/decisions/0063-keys-in-bytes.md). Tables whose rows are updated often have a fill factor that leaves
-- room for new versions on the row's page, so that PostgreSQL need not write to the indexes (HOT).

-- == Values

-- The schema refuses what Python or AMQP cannot represent, because a producer may insert any value
-- (docs/decisions/0065-values-that-python-cannot-represent.md). A domain costs less than a check of the table: PostgreSQL
-- parses the checks of a table at each statement that writes to it, but keeps the constraints of a domain. `not valid`: a
-- database with a damaged row can be dumped and restored.
create domain email_instant as timestamptz;
alter domain email_instant add constraint email_instant_representable
    check (value >= '1970-01-01 00:00+00' and value < '10000-01-01 00:00+00') not valid;
comment on domain email_instant is 'An instant in the years 1970 to 9999. Python knows no instant after them.';

create domain email_traceparent as text;
alter domain email_traceparent add constraint email_traceparent_form check (char_length(value) = 55) not valid;
comment on domain email_traceparent is 'A W3C traceparent. It becomes a header of a message.';

create domain email_on_uncertain as text;
alter domain email_on_uncertain add constraint email_on_uncertain_known check (value in ('hold', 'resend')) not valid;

create domain email_status as text constraint email_status_known
    check (value in ('pending', 'waiting', 'sending', 'sent', 'failed', 'held', 'cancelled'));
create domain email_wait_reason as text constraint email_wait_reason_known
    check (value in ('scheduled', 'redelivery', 'domain'));

-- The smallest UUIDv7 of an instant's millisecond (RFC 9562, section 5.7).
create function email_id_lowest_at(at timestamptz) returns uuid
language sql immutable strict parallel safe
return (lpad(to_hex(floor(extract(epoch from at) * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid;

-- == The database, its secret key, and the hashes of addresses

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

-- One row, with random values. An in-flight ledger carries the id, so that no relay settles the ledger of another database.
-- Addresses in events, suppressions and recipients are stored as hashes with the key: without it, an address cannot be
-- tested against a hash. A copy of the database (a dump, a base backup, a standby) has the same id and key.
create table dispatcher_database (
    is_only boolean primary key default true constraint dispatcher_database_is_only check (is_only),
    database_id uuid not null default gen_random_uuid(),
    address_key bytea not null default uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()),
    address_key_inner bytea not null generated always as (address_key_block(address_key, 54)) stored,
    address_key_outer bytea not null generated always as (address_key_block(address_key, 92)) stored,
    recipients_since timestamptz not null default clock_timestamp()
);
comment on column dispatcher_database.recipients_since is 'Emails that were enqueued since then are found by their recipients. Older emails have no rows in email_recipient.';
insert into dispatcher_database default values;
analyze dispatcher_database;  -- without statistics, PostgreSQL would plan hash_addresses anew at each call

-- The first 6 bytes of the hash of each address, as `AddressHasher.hash` in store/address_hashes.py computes it. Among
-- 10,000,000 emails to one domain, a look-up finds an email of another recipient once in 28,000,000 look-ups. The
-- addresses are already normalised. A role that enqueues may call the function, but cannot read the key: with the key,
-- an application could forge links to unsubscribe. (It cannot do so with this function: the text that such a link signs
-- begins with a NUL.)
--
-- The function stores no search_path, which PostgreSQL would compute anew at each call. So every name in it has its
-- schema; otherwise the caller's search_path could replace an operator or a table, and read the key. No variable holds
-- the key: in a plan, PostgreSQL would replace it by its value, which `debug_print_plan` shows.
do $migration$
begin
    execute format(
        $function$
        create function hash_addresses(addresses text[]) returns bytea[]
        language plpgsql stable strict parallel safe security definer
        as $$
        begin
            return array(
                select pg_catalog.substring(pg_catalog.sha256(
                    d.address_key_outer operator(pg_catalog.||) pg_catalog.sha256(
                        d.address_key_inner operator(pg_catalog.||) pg_catalog.convert_to(a.address, 'UTF8')
                    )
                ), 1, 6)
                from %I.dispatcher_database as d
                cross join pg_catalog.unnest(addresses) as a (address)
            );
        end
        $$
        $function$,
        current_schema()
    );
end
$migration$;
revoke execute on function hash_addresses(text[]) from public;

-- == Emails: what was enqueued, what became of it, and every attempt

-- Tables with a row or more per email are partitioned by ranges of email_id. A UUIDv7 begins with its time, so a range of
-- ids is a week: look-ups by id read one partition, and retention drops whole partitions.

-- The hot row: small, updated at lease and at record. Content is elsewhere. No statement may update a column that is
-- indexed without need.
create table email_log (
    email_id uuid primary key,
    tenant_id text not null,
    message_key text not null,
    status text not null default 'pending',
    attempt_count integer not null default 0,
    lease_token bigint not null default 0,
    locked_until email_instant not null default 'epoch'::timestamptz,
    locked_by text,
    on_uncertain email_on_uncertain,
    correlation_id text,
    traceparent email_traceparent,
    last_error text,
    error_type text,
    provider text,
    provider_message_id text,
    created_at timestamptz not null default clock_timestamp(),
    published_at timestamptz,
    sent_at timestamptz,
    publish_due_at timestamptz,
    dead_letter_due_at timestamptz,
    attempt_base integer not null default 0,
    dead_letter_discarded_at timestamptz,
    was_uncertain boolean not null default false,
    crash_count smallint not null default 0,
    rescued_from text,
    rescued_token bigint,
    rescued_in_doubt boolean,
    proven_by text,
    pinned_at timestamptz,
    lane text not null default 'normal',
    wait_until timestamptz,
    wait_reason text,
    expires_at timestamptz,
    due_since email_instant,
    max_attempts integer,
    redeliver_seconds double precision,
    redelivery_count integer not null default 0,
    leased_at timestamptz,
    settled_at timestamptz,
    dead_lettered_at timestamptz,
    channel text,
    wait_domain text,
    recipient_outcomes jsonb,
    attempt_worker text,
    attempt_started_at timestamptz,
    attempt_finished_at timestamptz
) partition by range (email_id);

create table email_log_default partition of email_log default;

-- The casts check the words of both columns. The columns themselves are text, because the predicates of indexes compare
-- them with text.
alter table email_log add constraint email_log_waits check (
    (status::email_status = 'waiting') = (isfinite(wait_until) is true)
    and wait_reason::email_wait_reason is not distinct from wait_reason
) not valid;

comment on column email_log.lease_token is 'Fences writes: only the lease that was given this token may close it.';
comment on column email_log.on_uncertain is 'Null: the policy of the host that settles it: mostly the one that sends, but the leader where that one vanished.';
comment on column email_log.publish_due_at is 'When its message must be on the send queue; null once a broker confirmed it.';
comment on column email_log.dead_letter_due_at is 'When its dead letter must be on the DLQ; null once a broker confirmed it.';
comment on column email_log.attempt_base is 'attempt_count at the last replay, redelivery or partial delivery: attempts count towards the maximum from here.';
comment on column email_log.dead_letter_discarded_at is 'A person took its dead letter off the DLQ for good; null again after a replay.';
comment on column email_log.was_uncertain is 'An attempt may have left without an answer: whatever the status says of later ones, it may have been accepted.';
comment on column email_log.crash_count is 'Workers that died while they rendered it.';
comment on column email_log.rescued_from is 'The worker whose expired lease the rescue took away when it held the email.';
comment on column email_log.rescued_token is 'The token of that lease. Null once its worker has recorded an uncertain attempt under it: then nothing undoes the rescue.';
comment on column email_log.rescued_in_doubt is 'was_uncertain before that rescue.';
comment on column email_log.proven_by is 'The provider whose event proved that it accepted the email.';
comment on column email_log.pinned_at is 'When the first attempt whose outcome is unknown began; until its idempotency key expires, only `provider` may be tried. Null: any provider.';
comment on column email_log.lane is 'Decides the send queue, and the share of workers and rates.';
comment on column email_log.wait_until is 'When a waiting email becomes pending and due; null unless it is waiting.';
comment on column email_log.wait_reason is 'Why a waiting email waits, or last waited.';
comment on column email_log.expires_at is 'From then on, no attempt begins, and the email is cancelled. Null: never.';
comment on column email_log.due_since is 'When the email could first be sent: its schedule, or its last replay. Null: created_at.';
comment on column email_log.max_attempts is 'From its lane when it was enqueued. Null: the setting of the host that sends.';
comment on column email_log.redeliver_seconds is 'From its lane when it was enqueued: for how long after due_since a deferred email is tried again. Null: the setting of the host that sends.';
comment on column email_log.redelivery_count is 'How often the email has waited for a redelivery since due_since.';
comment on column email_log.leased_at is 'When a worker last leased it.';
comment on column email_log.settled_at is 'When it last became failed, held or cancelled.';
comment on column email_log.dead_lettered_at is 'When RabbitMQ last confirmed its dead letter.';
comment on column email_log.channel is 'Null: an email. sms: an SMS, whose recipient is a phone number.';
comment on column email_log.wait_domain is 'The recipient domain for whose ceiling the email waits, or last waited.';
comment on column email_log.recipient_outcomes is 'The recipients who need no further attempt, by position over to, cc and bcc: null if a provider accepted the email for this recipient, otherwise the code with which the provider refused the recipient for good. Null: every attempt concerned all recipients. If not null, attempt_base is greater than 0.';
comment on column email_log.attempt_worker is 'Not null: this row contains the attempt with the number attempt_count, which was accepted. See the view every_attempt.';

-- Each index contains only the emails in one state, which most emails are in for milliseconds or never.
-- What the relay must publish: the oldest of all; and in turns among tenants, even if one tenant has a million due emails.
create index email_log_publish_due on email_log (publish_due_at) where publish_due_at is not null;
create index email_log_due_by_tenant on email_log (lane, tenant_id, publish_due_at) where publish_due_at is not null;
create index email_log_dead_letter_due on email_log (dead_letter_due_at) where dead_letter_due_at is not null;
-- Emails that are being sent, whose lease may expire; what keeps a week from being pruned; lists of failed and held emails.
create index email_log_unfinished on email_log (status, email_id) where status <> 'sent';
-- An event may arrive before the worker has recorded its result. Then the mark waits in the row: the email is not leased
-- again, and becomes `sent` as soon as its lease has ended.
create index email_log_proven on email_log (email_id) where proven_by is not null and status <> 'sent';
create index email_log_waiting on email_log (wait_until) where status = 'waiting';
create index email_log_expiring on email_log (expires_at)
    where expires_at is not null and status in ('pending', 'waiting', 'held');
-- Lost messages per lane, among emails that were published and not leased. A lease usually clears the due mark in the write
-- that leases the email, so few emails enter this index.
create index email_log_unleased on email_log (lane, published_at) where status = 'pending' and publish_due_at is null;
create index email_log_correlation on email_log (correlation_id, email_id) where correlation_id is not null;
-- To count dead letters and held emails, also of one tenant, however many emails failed because their recipients are
-- suppressed. Only failing, holding and deciding an email write it.
create index email_log_undecided on email_log (status, tenant_id, email_id)
    where status in ('failed', 'held')
        and dead_letter_discarded_at is null
        and error_type is distinct from 'suppressed';
-- Messages of other channels whose end is unknown are polled by the time since which they are sent or held (polling.sql).
create index email_log_polled on email_log (coalesce(sent_at, settled_at))
    where channel is not null and status in ('sent', 'held');
create index email_log_in_line on email_log (wait_domain, wait_until)
    where status = 'waiting' and wait_reason = 'domain';

-- Written once, read at send, deletable on its own. A worker reads large content when it is about to send it.
create table email_content (
    email_id uuid primary key,
    sender text not null,
    recipients jsonb not null,
    subject text not null,
    text_body text,
    html_body text,
    template_id text,
    template_data jsonb,
    headers jsonb,
    tags jsonb,
    attachment_count integer not null default 0,
    octets integer,
    ignore_suppression boolean not null default false
) partition by range (email_id);
comment on column email_content.recipients is 'Lists of addresses under "to", "cc", "bcc" and "reply_to"; empty ones are absent.';
comment on column email_content.octets is 'Bodies, template data and attachments together. Null: written by a release that did not store it.';

create index email_content_one_time on email_content (email_id) where tags ? 'one_time_code';

create table email_attachment (
    email_id uuid not null,
    position integer not null,
    filename text not null,
    content_type text not null,
    content bytea not null,
    constraint email_attachment_pkey primary key (email_id, position)
) partition by range (email_id);

create table email_attempt (
    email_id uuid not null,
    attempt_number integer not null,
    worker text not null,
    provider text not null,
    started_at timestamptz not null,
    finished_at timestamptz not null,
    outcome text not null,
    error_type text,
    error text,
    provider_code text
) partition by range (email_id);
create index email_attempt_email on email_attempt (email_id, attempt_number);

-- An acceptance ends an email's last attempt, because `sent` is final. So the email's own row can contain this attempt
-- (docs/decisions/0079-attempts-in-rows.md).
create view every_attempt as
select
    email_id, attempt_number, worker, provider, started_at, finished_at, outcome, error_type, error, provider_code
from email_attempt
union all
select
    email_id, attempt_count, attempt_worker, provider, attempt_started_at, attempt_finished_at, 'accepted', null,
    last_error, null
from email_log
where status = 'sent'
    and attempt_worker is not null
    and provider is not null
    and attempt_started_at between '1970-01-01 00:00+00' and '9999-12-31 00:00+00'
    and attempt_finished_at between '1970-01-01 00:00+00' and '9999-12-31 00:00+00';
comment on view every_attempt is 'Every attempt, in whichever table it is. A producer may insert any row, so an attempt that lacks a value, or whose times Python cannot represent, does not count.';

-- Counts per hour. A worker slot's row has one writer at a time, so batches of different workers never wait for each other.
create table email_hourly (
    hour timestamptz not null,
    provider text collate "C" not null,
    outcome text collate "C" not null,
    slot text collate "C" not null,
    email_count bigint not null,
    constraint email_hourly_pkey primary key (hour, provider, outcome, slot)
) with (fillfactor = 50);

-- == Message keys

-- One row per message key, which every replay leaves; not partitioned, so that a key stays unique. A key is completed by an
-- update, and a seventh of these find no room on their page and leave a dead row. By default autovacuum waits until a fifth
-- of a table is dead; this table only grows, so it would come ever more seldom.
create table email_idempotency (
    tenant_id text collate "C" not null,
    message_key text collate "C" not null,
    email_id uuid not null,
    payload_hash bytea not null,
    created_at timestamptz not null default clock_timestamp(),
    completed_at timestamptz,
    constraint email_idempotency_pkey primary key (tenant_id, message_key)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);
comment on column email_idempotency.payload_hash is 'SHA-256 of the payload, to recognise a repeated enqueue. Empty: the email was erased (`dispatcher forget`).';

-- Keys are written in the order of time, so a summary of pages finds the old ones.
create index email_idempotency_created on email_idempotency using brin (created_at) with (pages_per_range = 16);

-- The emails that have these message keys: a row per key that exists, and payload_hash of the argument if the stored hash
-- is the same; otherwise null. If a key is asked with several hashes, its row with a hash is the last of its rows. No role
-- that enqueues may read payload_hash: the hash has no secret key, so a role that reads it can hash a million texts, and
-- find the one in "482913 is your code.".
--
-- A key without an email is deleted, so that the caller can enqueue its email. `enqueue` inserts both in one statement; a
-- role that may enqueue can also insert a key alone. After a day, the email may have been pruned (the shortest retention),
-- so the key stays.
--
-- A role that may not read the stored hash could guess here, too. So each wrong guess about a key takes a tenth of a
-- second, and a call with a million guesses does not end. A role that cancels the call after a wrong guess needs a
-- statement per guess. A wrong guess is a mistake of an application: it has used one key for two payloads.
create function find_keys(tenant_ids text[], message_keys text[], payload_hashes bytea[])
returns table (tenant_id text, message_key text, email_id uuid, payload_hash bytea)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
begin
    delete from email_idempotency as k
    using unnest(tenant_ids, message_keys) as asked (tenant_id, message_key)
    where k.tenant_id = asked.tenant_id
        and k.message_key = asked.message_key
        and k.completed_at is null
        and k.created_at > clock_timestamp() - interval '1 day'
        and not exists (
            select from email_log as e
            where e.email_id = k.email_id and e.tenant_id = k.tenant_id and e.message_key = k.message_key
        );
    return query
    select k.tenant_id, k.message_key, k.email_id, case when k.payload_hash = asked.payload_hash then asked.payload_hash end
    from unnest(tenant_ids, message_keys, payload_hashes) as asked (tenant_id, message_key, payload_hash)
    join email_idempotency as k using (tenant_id, message_key)
    order by k.payload_hash = asked.payload_hash;
    if not has_column_privilege(session_user, 'email_idempotency', 'payload_hash', 'select') then
        perform pg_sleep(0.1 * max(wrong))
        from (
            select count(*) as wrong
            from unnest(tenant_ids, message_keys, payload_hashes) as asked (tenant_id, message_key, payload_hash)
            join email_idempotency as k using (tenant_id, message_key)
            where k.payload_hash <> asked.payload_hash
            group by k.tenant_id, k.message_key
        ) as guessed;
    end if;
end
$$;
revoke execute on function find_keys(text[], text[], bytea[]) from public;

-- == Recipients: an email is found by whom it went to

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

-- The newest `most` emails, between two ids, with a recipient in a domain, and with this address unless wanted_hash is
-- null. Reads from the newest email back, in windows that double, and stops when it has found enough. So it reads few
-- pages for a rare recipient, which few summaries contain, and for a frequent one, which the first windows contain.
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

-- Checks the summaries of a partition of email_recipient, and creates them again if look-ups read too many pages
-- because of them. Returns whether it has done so.
--
-- Autovacuum creates the summaries of new pages, but forgets requests if there are many. If the creation of a summary
-- is cancelled, or the server stops during it, the summary stays unfinished, and no vacuum finishes it. Each look-up
-- then also reads all later pages of the partition (seen with PostgreSQL 15 and 18). Only a superuser's extension shows
-- unfinished summaries. So this function measures how many pages are read for a recipient that does not exist.
create function email_recipient_summarize(partition text) returns boolean
language plpgsql
security definer
set search_path from current
set enable_seqscan = off
set max_parallel_workers_per_gather = 0
set jit = off
-- Shorter than deadlock_timeout. A session that waits longer for autovacuum's lock cancels autovacuum.
set lock_timeout = '500ms'
as $$
declare
    range_pages constant integer := 16;  -- as in email_recipient_summary
    summaries regclass;
    pages integer;
    plan json;
    replaces boolean;
    has_changed boolean := false;
begin
    select i.indexrelid::regclass, pg_relation_size(i.indrelid) / current_setting('block_size')::integer
    into summaries, pages
    from pg_inherits as h
    join pg_index as i on i.indrelid = h.inhrelid
    join pg_class as c on c.oid = i.indexrelid
    join pg_am as a on a.oid = c.relam and a.amname = 'brin'
    where h.inhparent = 'email_recipient'::regclass
        and h.inhrelid = to_regclass(quote_ident(partition));
    if summaries is null then
        return false;
    end if;
    -- First the ranges without a summary; then, if still too many pages are read, every range.
    foreach replaces in array array[false, true] loop
        execute format(
            'explain (analyze, timing off, format json) select from %I where address_hash = %L and domain = %L',
            partition, '\x', ''
        ) into plan;
        -- The last range is summarised when it is full, and the ranges before it within a minute or two.
        exit when coalesce((plan -> 0 -> 'Plan' ->> 'Lossy Heap Blocks')::bigint, 0) <= 4 * range_pages + pages / 20;
        for first_page in 0..pages - range_pages by range_pages loop
            if replaces then
                perform brin_desummarize_range(summaries, first_page);
            end if;
            perform brin_summarize_range(summaries, first_page);
        end loop;
        has_changed := true;
    end loop;
    return has_changed;
exception
    when lock_not_available or undefined_table then  -- vacuum works on the partition, or it was dropped just now
        return false;
end
$$;
revoke execute on function email_recipient_summarize(text) from public;

-- The domains of an email's recipients, without duplicates. Empty: the content was deleted. For roles that may not read
-- addresses.
create function recipient_domains(wanted_email_id uuid) returns text[]
language plpgsql stable strict parallel safe security definer set search_path from current as $$
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

-- == Events: what providers report after they accepted an email

-- An event proves that the provider accepted the email, so it settles an email whose outcome was unknown.
create table email_event (
    email_id uuid not null,
    event_key bytea not null,
    provider text not null,
    kind text not null,
    bounce text,
    address_hash bytea,
    code text,
    detail text,
    happened_at timestamptz not null,
    received_at timestamptz not null default clock_timestamp(),
    doubt text constraint email_event_doubt_known check (doubt in ('impossible', 'recipient')),
    constraint email_event_pkey primary key (email_id, event_key),
    constraint email_event_kind_known check (
        kind in (
            'accepted', 'delivered', 'deferred', 'bounced', 'complained', 'rejected', 'unsubscribed', 'opened', 'clicked'
        )
    ),
    constraint email_event_bounce_known check ((bounce in ('hard', 'soft', 'blocked')) = (kind = 'bounced'))
) partition by range (email_id);
comment on column email_event.event_key is 'A hash of what the event says (domain/event.py), because a provider may repeat an event under a new event id.';
comment on column email_event.address_hash is 'HMAC of the recipient with dispatcher_database.address_key; null: the event has no recipient.';
comment on column email_event.happened_at is 'By the provider''s clock.';
comment on column email_event.doubt is 'Why the event is not believed. impossible: no worker can have sent the email through this provider, so the event proves nothing. recipient: nothing proves that the event is about this recipient, so it suppresses nobody. Null: there is no doubt.';

create index email_event_address on email_event (address_hash) where address_hash is not null;
create index email_event_received on email_event (received_at);
create index email_event_impossible on email_event (received_at) where doubt = 'impossible';

-- The SMS from recipients that were handled. A provider signs its requests without a time, so a copy of an old request is
-- recognised by its message.
create table inbound_message (
    message_id text collate "C" primary key,
    received_at timestamptz not null default clock_timestamp()
);

-- The certificates of Amazon SNS that have verified a message of an allowed topic. A new process needs no fetch for them.
create table sns_certificate (
    url text collate "C" primary key,
    pem text not null,
    stored_at timestamptz not null default clock_timestamp()
);

-- == Weekly partitions

-- The two settings of email_log's indexes. A lease and a record each add an entry for a new version of the row to the
-- primary key. Without room for them, PostgreSQL would search a full page for superfluous entries, then split it. The
-- entries of email_log_unfinished have different keys, so they cannot share a key.
create function email_partition_tune_indexes(partition text) returns void
language plpgsql set search_path from current as $$
declare
    tuning text;
begin
    for tuning in
        select
            format('alter index %s set (%s)', h.inhrelid::regclass, case h.inhparent
                when 'email_log_pkey'::regclass then 'fillfactor = 40'
                else 'deduplicate_items = off'
            end)
        from pg_inherits as h
        join pg_index as i on i.indexrelid = h.inhrelid
        where i.indrelid = to_regclass(quote_ident(partition))
            and h.inhparent in ('email_log_pkey'::regclass, 'email_log_unfinished'::regclass)
    loop
        execute tuning;
    end loop;
end
$$;

-- A partitioned table cannot have storage settings, so each partition gets its own. PostgreSQL summarises the last,
-- unfinished range of pages when it creates an index, even if the table is empty. Each insert into this range would
-- compress and write its summary again, which takes almost as long as the rest of an enqueue. So the range gets its
-- summary only when it is full.
create function email_partition_tune(partition text) returns void
language plpgsql set search_path from current as $$
begin
    if partition like 'email_log%' then
        execute format(
            'alter table %I set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, '
            'autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 1)',
            partition
        );
    end if;
    if partition like 'email_recipient%' then
        perform brin_desummarize_range(
            i.indexrelid, pg_relation_size(i.indrelid) / current_setting('block_size')::integer
        )
        from pg_index as i
        join pg_class as c on c.oid = i.indexrelid
        join pg_am as a on a.oid = c.relam and a.amname = 'brin'
        where i.indrelid = to_regclass(quote_ident(partition));
    end if;
    perform email_partition_tune_indexes(partition);
end
$$;

-- Rows of the new partition's range that had to go to the default partition move into it.
create function email_partition_make(parent text, partition text, from_id uuid, until_id uuid) returns void
language plpgsql set search_path from current as $$
begin
    -- An insert into the default partition that committed between the move and the attachment would make the latter fail.
    execute format('lock table %I in access exclusive mode', parent || '_default');
    execute format('create table %I (like %I including defaults including constraints)', partition, parent);
    execute format(
        'with moved as (delete from %I where email_id >= %L and email_id < %L returning *) insert into %I select * from moved',
        parent || '_default', from_id, until_id, partition
    );
    execute format(
        'alter table %I attach partition %I for values from (%L) to (%L)', parent, partition, from_id, until_id
    );
    perform email_partition_tune(partition);
end
$$;

-- Creates the missing partitions of the week of an instant and of the weeks after it; returns their names. Idempotent.
-- Concurrent calls wait for each other at a row that only the owner can lock.
create function email_partitions_make(at timestamptz, weeks_ahead integer) returns setof text
language plpgsql security definer set search_path from current as $$
declare
    parent text;
    week timestamp;
    name text;
begin
    perform from dispatcher_database for update;
    foreach parent in array array[
        'email_log', 'email_content', 'email_attachment', 'email_attempt', 'email_event', 'email_recipient'
    ] loop
        for step in 0..weeks_ahead loop
            week := date_trunc('week', at at time zone 'UTC') + step * interval '1 week';
            name := parent || to_char(week, '"_p"YYYYMMDD');
            if to_regclass(quote_ident(name)) is null then
                perform email_partition_make(
                    parent, name, email_id_lowest_at(week at time zone 'UTC'),
                    email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
                );
                return next name;
            end if;
        end loop;
    end loop;
end
$$;
revoke execute on function email_partitions_make(timestamptz, integer) from public;

-- No insert fails because a partition is missing.
create table email_content_default partition of email_content default;
create table email_attachment_default partition of email_attachment default;
create table email_attempt_default partition of email_attempt default;
create table email_event_default partition of email_event default;
create table email_recipient_default partition of email_recipient default;
select email_partition_tune('email_log_default'), email_partition_tune('email_recipient_default');

-- == Retention: old emails leave by whole partitions

-- The weekly partitions of one of our tables whose week ended before an instant, oldest first.
create function email_partitions_ended(parent text, before_at timestamptz)
returns table (partition text, from_id uuid, until_id uuid)
language sql stable set search_path from current as $$
    select
        name, email_id_lowest_at(week at time zone 'UTC'), email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
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

-- Whether an email of a range of ids must keep its content and its row, because it is unfinished or an operator still has
-- to decide. Retention counts from when an email could first be sent, because it may be scheduled for a time weeks after
-- its week. Two questions, because each can use the index of unfinished emails.
create function email_log_must_stay(from_id uuid, until_id uuid, undecided_since timestamptz) returns boolean
language sql stable set search_path from current as $$
    select exists (
        select from email_log
        where email_id >= from_id and email_id < until_id
            and status in ('pending', 'sending', 'waiting')
    ) or exists (
        select from email_log
        where email_id >= from_id and email_id < until_id
            and status in ('failed', 'held')
            and dead_letter_discarded_at is null
            and greatest(created_at, due_since) >= undecided_since
    )
$$;

-- Whether an email of a range of ids was enqueued since an instant: by this database's clock, because a producer whose clock
-- is behind makes ids that look old. An index on created_at would cost every enqueue, for a question of once a week; without
-- one each row is read, and in the order of the disk, not of the ids. The text is planned for these values: a plan for any
-- values would take the range to be small.
create function email_log_enqueued_since(from_id uuid, until_id uuid, since timestamptz) returns boolean
language plpgsql stable cost 1000000 set enable_seqscan = on set search_path from current as $$
declare
    is_found boolean;
begin
    execute 'select exists ('
        'select from email_log where email_id >= $1 and email_id < $2 and greatest(created_at, due_since) >= $3'
        ')'
    into is_found
    using from_id, until_id, since;
    return is_found;
end
$$;

-- Drops the oldest partition of a table whose week ended before an instant, unless an email of that week must stay; returns
-- its name, or nothing if there is no such partition. A statement that makes an old email pending again reads its content in
-- the same statement. So the lock on email_content shows whether there is such an email: its transaction has committed, or
-- it comes later and finds the content gone. The wait is short, because every other session waits behind it.
create function email_partition_prune(parent text, before_at timestamptz, undecided_since timestamptz) returns setof text
language plpgsql security definer set search_path from current as $$
declare
    ended record;
begin
    for ended in select * from email_partitions_ended(parent, before_at) loop
        continue when email_log_must_stay(ended.from_id, ended.until_id, undecided_since);
        continue when email_log_enqueued_since(ended.from_id, ended.until_id, before_at);
        perform set_config('lock_timeout', '500ms', true);
        lock table email_content in access exclusive mode;
        if not email_log_must_stay(ended.from_id, ended.until_id, undecided_since) then
            execute format('drop table %I', ended.partition);
            return next ended.partition;
            return;
        end if;
    end loop;
end
$$;
revoke execute on function email_partition_prune(text, timestamptz, timestamptz) from public;

-- == Operators' acts: replays, and a record of every act

-- Emails that an operator wants sent again. Which ones is settled when the replay is created: email_replay_item.
create table email_replay (
    replay_id bigint generated always as identity primary key,
    state text not null default 'running',
    source text not null,
    selection jsonb not null,
    include_held boolean not null,
    per_second double precision,
    actor text not null,
    reason text not null,
    created_at timestamptz not null default clock_timestamp(),
    changed_at timestamptz not null default clock_timestamp(),
    paced_with bigint[] default '{}',
    constraint email_replay_state_known check (state in ('running', 'stopped', 'done'))
);
comment on column email_replay.state is 'Whether it may go on; whether a process is running it shows in the named lock on its id.';
comment on column email_replay.paced_with is 'Replays that ran over the same emails when this one began: together they keep the slowest pace. Null: it keeps its own.';
create index email_replay_created on email_replay (created_at);  -- for retention

create table email_replay_item (
    replay_id bigint not null,
    email_id uuid not null,
    outcome text,
    settled_at timestamptz,
    constraint email_replay_item_pkey primary key (replay_id, email_id)
);
comment on column email_replay_item.outcome is 'Null while it waits for its turn.';
create index email_replay_item_waiting on email_replay_item (replay_id, email_id) where outcome is null;
create index email_replay_item_email on email_replay_item (email_id);

-- Append-only. Holds no address but what an actor calls himself.
create table operator_audit (
    audit_id bigint generated always as identity primary key,
    acted_at timestamptz not null default clock_timestamp(),
    actor text not null,
    action text not null,
    reason text,
    email_id uuid,
    replay_id bigint,
    detail jsonb
);
create index operator_audit_email on operator_audit (email_id) where email_id is not null;
create index operator_audit_acted on operator_audit (acted_at);

create function operator_audit_keep() returns trigger
language plpgsql set search_path from current as $$
begin
    if coalesce(current_setting('dispatcher.prune_audit', true), '') <> 'on' then
        raise exception 'operator_audit is append-only'
            using hint = 'Retention sets dispatcher.prune_audit to on in its own session.';
    end if;
    return null;
end
$$;

create trigger operator_audit_keep
before update or delete or truncate on operator_audit
for each statement execute function operator_audit_keep();

-- The one way to delete acts.
create function operator_audit_prune(before_at timestamptz, at_most integer) returns setof bigint
language plpgsql security definer set search_path from current as $$
begin
    perform set_config('dispatcher.prune_audit', 'on', true);
    return query
    delete from operator_audit
    where audit_id in (
        select audit_id from operator_audit where acted_at < before_at order by acted_at limit at_most
    )
    returning audit_id;
    perform set_config('dispatcher.prune_audit', 'off', true);
end
$$;
revoke execute on function operator_audit_prune(timestamptz, integer) from public;

-- == Controls: what operators set, and every process reads about once per second

create table lane_policy (
    lane text collate "C" primary key,
    weight double precision not null constraint lane_policy_weight_positive check (weight > 0),
    on_uncertain text constraint lane_policy_on_uncertain_known check (on_uncertain in ('hold', 'resend')),
    max_attempts integer,
    redeliver_seconds double precision
);
comment on column lane_policy.weight is 'Its share of workers and rates, relative to the other lanes that have emails.';
comment on column lane_policy.on_uncertain is 'For emails that set none of their own; null: the setting of the host.';

create table lane_rule (
    sender text collate "C" primary key,
    lane text not null
);
comment on column lane_rule.sender is 'An address, or a domain as `@example.com`, in lower case.';

create table tenant_limit (
    tenant_id text collate "C" primary key,
    weight double precision not null default 1 constraint tenant_limit_weight_positive check (weight > 0),
    per_second double precision constraint tenant_limit_per_second_positive check (per_second > 0)
);
comment on column tenant_limit.weight is 'Its share within a lane, relative to the other tenants that have due emails; 1 for others.';
comment on column tenant_limit.per_second is 'The most emails per second, all hosts together; null: no limit.';

create table pause (
    scope text collate "C" not null constraint pause_scope_known check (scope in ('all', 'lane', 'tenant', 'provider')),
    name text collate "C" not null,
    until_at timestamptz,
    reason text not null,
    actor text not null,
    began_at timestamptz not null default clock_timestamp(),
    constraint pause_pkey primary key (scope, name),
    constraint pause_all_has_no_name check ((scope = 'all') = (name = ''))
);
comment on column pause.name is 'The lane, tenant or provider; empty for all.';
comment on column pause.until_at is 'Null: until `dispatcher resume`.';

-- The ceilings of recipient domains, for the provider smtp. Workers share the measured length of attempts to a domain, so
-- that its emails become due at the pace that its servers allow (docs/decisions/0053-recipient-domains.md and
-- 0057-measured-paces.md).
create table domain_limit (
    domain text collate "C" primary key,
    per_second double precision constraint domain_limit_per_second_positive check (per_second > 0),
    concurrent integer constraint domain_limit_concurrent_positive check (concurrent > 0),
    tokens double precision not null default 0,
    refilled_at timestamptz not null default clock_timestamp(),
    holders jsonb not null default '{}',
    attempt_seconds double precision,
    constraint domain_limit_limits check (per_second is not null or concurrent is not null)
);
comment on column domain_limit.domain is 'In lower case, without subdomains; an internationalized domain as A-labels.';
comment on column domain_limit.per_second is 'The most emails per second, all hosts together; null: no limit.';
comment on column domain_limit.concurrent is 'The most attempts at the same time, all hosts together; null: no limit.';
comment on column domain_limit.tokens is 'The tokens in the bucket at refilled_at.';
comment on column domain_limit.holders is 'By worker: how many attempts it may make at the same time (held), how many it wants, and until when (unix seconds).';
comment on column domain_limit.attempt_seconds is 'The mean length of the latest attempts of all workers; null: none was measured yet.';

create table domain_line (
    domain text collate "C" not null,
    lane text collate "C" not null,
    tenant_id text collate "C" not null,
    until_at timestamptz not null,
    constraint domain_line_pkey primary key (domain, lane, tenant_id)
);
comment on column domain_line.until_at is 'When the last email of the line becomes due.';

create table suppression (
    suppression_id bigint generated always as identity primary key,
    tenant_id text collate "C" not null,
    address_hash bytea not null,
    is_domain boolean not null,
    masked text not null,
    reason text not null,
    source_email_id uuid,
    source_event_key bytea,
    note text,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz,
    changed_in xid8 not null default pg_current_xact_id(),
    constraint suppression_once unique (tenant_id, address_hash),
    constraint suppression_reason_known check (reason in ('hard_bounce', 'soft_bounce', 'complaint', 'unsubscribe', 'manual'))
);
comment on column suppression.address_hash is 'HMAC of the address, or of the domain if is_domain, with dispatcher_database.address_key.';
comment on column suppression.masked is 'What an operator recognises: `j•••@example.com`, or the domain.';
comment on column suppression.source_email_id is 'The email whose event made the entry; null: a person or an import made it.';
comment on column suppression.expires_at is 'Null: never.';
comment on column suppression.changed_in is 'The transaction that wrote the entry. Workers read the entries of transactions that they have not seen yet.';
create index suppression_changed on suppression (changed_in);
create index suppression_expires on suppression (expires_at) where expires_at is not null;
create index suppression_listed on suppression (tenant_id, created_at, suppression_id);  -- pages of a list

-- == Who may ask the HTTP API and the operators' page for what

-- A key's secret is 32 random bytes, so one round of SHA-256 keeps it: there is no password to guess.
create table api_key (
    key_id text collate "C" primary key,
    tenant_id text,
    name text not null,
    secret_hash bytea not null,
    scopes text[] not null,
    sender_domains text[],
    sender_addresses text[],
    requests_per_second double precision,
    recipients_per_day integer,
    created_at timestamptz not null default clock_timestamp(),
    revoked_at timestamptz,
    lane text,
    allowed_lanes text[] not null default '{}',
    constraint api_key_scopes_known check (scopes <@ array['send', 'read', 'operate', 'ignore_suppression'])
);
comment on column api_key.tenant_id is 'Null: the key acts for every tenant.';
comment on column api_key.sender_domains is 'Both lists null: it may send from any address. Otherwise from what one of them names.';
comment on column api_key.recipients_per_day is 'Null: no quota.';
comment on column api_key.lane is 'The lane of emails that name none. Null: by the sender''s rule, or normal.';
comment on column api_key.allowed_lanes is 'The lanes that an email may name, in addition to `lane`.';

-- The day is in UTC.
create table api_key_day (
    key_id text collate "C" not null,
    day date not null,
    recipient_count integer not null,
    constraint api_key_day_pkey primary key (key_id, day)
) with (fillfactor = 50);

-- A browser that is signed in to the operators' page. Only the hash of its token is stored. The rights are those of its
-- API key. An operator who has signed in with OpenID Connect has no key: then the row has the rights.
create table ops_session (
    token_hash bytea primary key,
    key_id text,
    name text not null,
    tenant_id text,
    may_act boolean not null,
    created_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp()
);
create index ops_session_created on ops_session (created_at);

-- Sign-ins with OpenID Connect that have come back from the issuer. Each comes back once, at any host.
create table ops_sign_in (
    state_hash bytea primary key,
    used_at timestamptz not null default clock_timestamp()
);

-- == The feed of events, which applications poll or get by webhook. Content and addresses are in no table of it

-- Whether statements write the feed. It has one row. Statements that change emails read it once per batch, so it must
-- stay small: nothing else writes it often.
create table outgoing_feed (
    is_only boolean primary key default true constraint outgoing_feed_is_only check (is_only),
    is_on boolean not null default false,
    wanted_at timestamptz not null default 'epoch'
);
comment on column outgoing_feed.wanted_at is 'When an application last polled, within an hour, or when a webhook was last added.';
insert into outgoing_feed default values;

-- A UUIDv7 (RFC 9562): 48 bits of the time in milliseconds, then the random bits of a UUIDv4, with the version changed.
create function outgoing_event_id_make() returns uuid
language sql volatile
return encode(
    set_bit(set_bit(overlay(
        uuid_send(gen_random_uuid())
        placing substring(int8send(floor(extract(epoch from clock_timestamp()) * 1000)::bigint) from 3) from 1 for 6
    ), 52, 1), 53, 1),
    'hex'
)::uuid;

create table outgoing_event (
    event_id uuid primary key default outgoing_event_id_make(),
    made_in xid8 not null default pg_current_xact_id(),
    position bigint generated always as identity,
    kind text not null,
    email_id uuid not null,
    tenant_id text not null,
    message_key text not null,
    correlation_id text,
    reason text,
    provider text,
    code text,
    bounce text,
    address_hash bytea,
    happened_at timestamptz,
    created_at timestamptz not null default clock_timestamp(),
    constraint outgoing_event_kind_known check (
        kind in ('sent', 'failed', 'held', 'delivered', 'bounced', 'complained', 'suppressed', 'cancelled')
    )
);
comment on column outgoing_event.event_id is 'The webhook-id: the same for each delivery and each receiver.';
comment on column outgoing_event.happened_at is 'By the provider''s clock; null: the event is a change of status.';

-- Readers follow (made_in, position). A transaction that commits late has a lower made_in than others that committed
-- before. So a reader reads only below the oldest transaction that is still open, and then misses no event.
create unique index outgoing_event_feed on outgoing_event (made_in, position);

create table webhook (
    webhook_id bigint generated always as identity primary key,
    url text not null,
    tenant_id text,
    kinds text[] not null,
    with_recipients boolean not null default false,
    secret text not null,
    previous_secret text,
    previous_until timestamptz not null default 'epoch',
    state text not null default 'active' constraint webhook_state_known check (state in ('active', 'disabled')),
    made_in xid8 not null default pg_snapshot_xmin(pg_current_snapshot()),
    position bigint not null default 0,
    revision bigint not null default 0,
    failing_since timestamptz,
    next_attempt_at timestamptz not null default 'epoch',
    last_error text,
    delivered_at timestamptz,
    created_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
comment on column webhook.tenant_id is 'Null: the events of all tenants.';
comment on column webhook.position is 'With made_in: the last event of the feed that was handled.';
comment on column webhook.revision is 'Grows with each change by an operator, which a delivery in progress must not undo.';
comment on column webhook.failing_since is 'When its receiver began to accept no event; null: it accepts events.';

-- Events that one receiver refused while it accepted others, or before it had refused many.
create table webhook_retry (
    webhook_id bigint not null,
    event_id uuid not null,
    failed_at timestamptz not null,
    due_at timestamptz,
    last_error text not null,
    constraint webhook_retry_pkey primary key (webhook_id, event_id),
    constraint webhook_retry_webhook foreign key (webhook_id) references webhook (webhook_id) on delete cascade
);
comment on column webhook_retry.failed_at is 'The first attempt.';
comment on column webhook_retry.due_at is 'The next attempt; null: every attempt failed.';
create index webhook_retry_due on webhook_retry (webhook_id, due_at) where due_at is not null;

-- == What the processes of all hosts have to agree on

-- One token bucket per provider that has a ceiling. Workers take tokens in chunks, so a row is written some ten times a
-- second per worker, not once per email.
create table provider_rate (
    provider text collate "C" primary key,
    per_second double precision not null,
    tokens double precision not null,
    refilled_at timestamptz not null,
    halved_at timestamptz not null default 'epoch'
) with (fillfactor = 50);
comment on column provider_rate.per_second is 'The rate now: the ceiling, or less after the provider throttled us.';

-- A worker slot's view of a provider, written when it changes. A row that is neither closed nor renewed no longer counts.
create table provider_state (
    provider text collate "C" not null,
    slot text collate "C" not null,
    state text not null constraint provider_state_known check (state in ('closed', 'paused', 'open', 'half_open')),
    reason text,
    changed_at timestamptz not null default clock_timestamp(),
    until_at timestamptz,
    resumed_at timestamptz,
    constraint provider_state_pkey primary key (provider, slot)
) with (fillfactor = 50);
comment on column provider_state.resumed_at is 'When an operator resumed the provider. The worker clears it, and tries the provider again. Null: nothing to do.';

-- A row means: the leading relay polls, so commits that make emails due do not notify it. Without a row, they notify it.
-- Each statement that makes emails due looks for a row once. So the table has no index, and is written rarely.
create table relay_polls (
    since timestamptz not null default clock_timestamp()
);
comment on column relay_polls.since is 'When emails began to become due so often that the relay polls.';

-- Which history of PostgreSQL the relay goes on from: a promotion, or a restore to a point in time, begins a new timeline.
-- One row at most, written each second by the leading relay.
create table relay_timeline (
    is_only boolean primary key default true constraint relay_timeline_is_only check (is_only),
    timeline integer not null,
    is_synchronous boolean not null,
    noted_at timestamptz not null default clock_timestamp(),
    uncertain_before timestamptz,
    doubted_at timestamptz
) with (fillfactor = 50);
comment on column relay_timeline.is_synchronous is 'Commits waited for a standby when this was noted, so that its promotion loses none.';
comment on column relay_timeline.uncertain_before is 'The last promotion lost commits: what was published by then may have been sent on the lost timeline. Null: none did.';
comment on column relay_timeline.doubted_at is 'When a relay found that.';

-- Locks are rows that only the dispatcher's roles can write, because every role that may connect to the database can take
-- an advisory lock.
create table named_lock (
    name text collate "C" primary key,
    pid integer not null,
    key integer not null,
    taken_at timestamptz not null default clock_timestamp()
);
comment on table named_lock is 'Which session has which named lock. A row counts only while its session has the advisory lock (pid, key), so a lock ends with its session.';
comment on column named_lock.pid is 'The process id of the session in PostgreSQL.';
comment on column named_lock.key is 'A random number, new each time the lock is taken. So another session with this pid does not count as the holder.';

-- The sessions that have the advisory lock that releases without named_lock took. is_ours: the session's role has the
-- needed right to the emails. Every role may take an advisory lock, so a lock of any other role means nothing.
create function advisory_lock_holders(lock_name text, needed_right text) returns table (pid integer, is_ours boolean)
language sql stable set search_path from current as $$
    select h.pid, coalesce(has_table_privilege(a.usesysid, 'email_log', needed_right), false)
    from pg_locks as h
    join pg_stat_activity as a on a.pid = h.pid
    where h.locktype = 'advisory'
        and h.database = (select oid from pg_database where datname = current_database())
        and (h.classid::bigint << 32) | h.objid::bigint = hashtext('email_dispatcher_' || lock_name)::bigint
        and h.objsubid = 1
        and h.granted
$$;

-- The process id of the session; null if the lock is free. Executes as the owner, so that roles which only read need no
-- right to the table.
create function named_lock_holder(lock_name text) returns integer
language sql stable security definer set search_path from current as $$
    (
        select l.pid
        from named_lock as l
        join pg_locks as h on h.pid = l.pid and h.classid = l.pid::oid and h.objid = l.key::oid
        where l.name = lock_name
            and h.locktype = 'advisory'
            and h.database = (select oid from pg_database where datname = current_database())
            and h.objsubid = 2
            and h.granted
    )
    union all
    (
        select pid
        from advisory_lock_holders(lock_name, 'update')
        where is_ours
    )
    limit 1
$$;

-- == What the monitors write: alerts, hosts, and figures per minute

-- One monitor checks a DLQ and alerts; the others wait. It renews its hold at each check.
create table alert_watch (
    queue text collate "C" primary key,
    holder text not null,
    held_until timestamptz not null
) with (fillfactor = 50);

-- A row per active alert, and per channel that has taken it: no channel waits for another one. Deleted when the channel has
-- taken the alert's end.
create table alert_told (
    queue text collate "C" not null,
    kind text collate "C" not null,
    channel text collate "C" not null,
    raised_at timestamptz not null,
    told_at timestamptz not null,
    constraint alert_told_pkey primary key (queue, kind, channel)
) with (fillfactor = 50);
comment on column alert_told.told_at is 'When the channel last took it: raised, or a reminder.';

-- The last check of each DLQ, by the monitor that alerts.
create table alert_check (
    queue text collate "C" primary key,
    host text not null,
    checked_at timestamptz not null,
    depth bigint,
    fault text,
    alerts jsonb not null
) with (fillfactor = 50);
comment on column alert_check.depth is 'Messages on the DLQ; null if RabbitMQ could not be read.';
comment on column alert_check.alerts is 'The active alerts: kind, raised_at, count, oldest_age_seconds, reason.';

-- A row per monitor, renewed at each of its checks, and deleted when it stops in order. So a host that vanished is noticed.
create table host_presence (
    holder text collate "C" primary key,
    host text not null,
    seen_at timestamptz not null,
    version text,
    processes jsonb
) with (fillfactor = 50);
comment on column host_presence.processes is 'The processes of the host''s `dispatcher run`, as its monitor last reported them. Null: not reported yet.';

-- One row per minute for the whole database. The difference of two rows is the rate.
create table minute_sample (
    minute timestamptz primary key,
    taken_at timestamptz not null,
    emails jsonb not null,
    oldest_pending_seconds double precision,
    longest_due_seconds double precision,
    queues jsonb,
    attempts jsonb not null,
    counted_since timestamptz not null,
    counted jsonb not null
) with (fillfactor = 50);
comment on column minute_sample.emails is 'The number of emails by status, without sent and cancelled.';
comment on column minute_sample.queues is 'Messages and consumers of each queue; null if RabbitMQ could not be read.';
comment on column minute_sample.attempts is 'Attempts by outcome, since the first sample; never less than in an earlier row.';
comment on column minute_sample.counted is 'The sum of email_hourly by outcome from counted_since on. The next sample adds what has been counted since then.';
