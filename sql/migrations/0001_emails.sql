-- The tables of the promise: what was enqueued, what became of it, and every attempt.
--
-- email_log, email_content, email_attachment and email_attempt are partitioned by range of email_id. A UUIDv7 begins
-- with its time, so a range of ids is a range of time: look-ups by id prune, and retention drops whole partitions.

-- The hot row: small, rewritten at lease and at record, never holding a body.
create table email_log (
    email_id uuid not null,
    tenant_id text not null,
    message_key text not null,
    status text not null default 'pending',
    attempt_count integer not null default 0,
    lease_token bigint not null default 0,
    locked_until timestamptz not null default 'epoch',
    locked_by text,
    on_uncertain text,
    correlation_id text,
    traceparent text,
    last_error text,
    error_type text,
    provider text,
    provider_message_id text,
    created_at timestamptz not null default clock_timestamp(),
    published_at timestamptz,
    sent_at timestamptz,
    publish_due_at timestamptz,
    dead_letter_due_at timestamptz,
    constraint email_log_pkey primary key (email_id),
    constraint email_log_status_known check (status in ('pending', 'sending', 'sent', 'failed', 'held')),
    constraint email_log_on_uncertain_known check (on_uncertain in ('hold', 'resend'))
) partition by range (email_id);

comment on column email_log.lease_token is 'Fences writes: only the lease that was given this token may close it.';
comment on column email_log.on_uncertain is 'Null: the policy of the host that sends.';
comment on column email_log.publish_due_at is 'When its message must be on the send queue; null once a broker confirmed it.';
comment on column email_log.dead_letter_due_at is 'When its dead letter must be on the DLQ; null once a broker confirmed it.';

-- Small by nature: what is due leaves within milliseconds, what is unfinished within seconds.
create index email_log_publish_due on email_log (publish_due_at) where publish_due_at is not null;
create index email_log_dead_letter_due on email_log (dead_letter_due_at) where dead_letter_due_at is not null;
create index email_log_unfinished on email_log (status, email_id) where status <> 'sent';

-- Written once, read at send, deletable on its own.
create table email_content (
    email_id uuid not null,
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
    constraint email_content_pkey primary key (email_id)
) partition by range (email_id);

comment on column email_content.recipients is 'Lists of addresses under "to", "cc", "bcc" and "reply_to"; empty ones are absent.';

create table email_attachment (
    email_id uuid not null,
    position integer not null,
    filename text not null,
    content_type text not null,
    content bytea not null,
    constraint email_attachment_pkey primary key (email_id, position)
) partition by range (email_id);

-- One row per message key, outliving every replay; not partitioned, so that a key stays unique for ever.
create table email_idempotency (
    tenant_id text not null,
    message_key text not null,
    email_id uuid not null,
    payload_hash bytea not null,
    created_at timestamptz not null default clock_timestamp(),
    completed_at timestamptz,
    constraint email_idempotency_pkey primary key (tenant_id, message_key)
) with (fillfactor = 80);

-- Append-only: one row per provider call that ended.
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

-- Counts per hour. A worker slot's row has one writer at a time, so batches of different workers never wait for each other.
create table email_hourly (
    hour timestamptz not null,
    provider text not null,
    outcome text not null,
    slot text not null,
    email_count bigint not null,
    constraint email_hourly_pkey primary key (hour, provider, outcome, slot)
) with (fillfactor = 50);

-- The smallest UUIDv7 of an instant's millisecond (RFC 9562, section 5.7).
create function email_id_lowest_at(at timestamptz) returns uuid
language sql immutable strict parallel safe
return (lpad(to_hex(floor(extract(epoch from at) * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid;

-- Makes one partition of one table. Rows of that range that had to go to the default partition move into it.
create function email_partition_make(parent text, partition text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
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

-- Storage settings cannot stand on a partitioned table, so each partition gets its own.
create function email_partition_tune(partition text) returns void
language plpgsql as $$
begin
    if partition like 'email_log%' then
        execute format(
            'alter table %I set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, '
            'autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 1)',
            partition
        );
    end if;
end
$$;

-- Makes the weekly partitions that hold an instant and the weeks after it; returns the names of those it made.
-- A second call is harmless; callers at once wait for each other.
create function email_partitions_make(at timestamptz, weeks_ahead integer) returns setof text
language plpgsql as $$
declare
    parent text;
    week timestamp;
    name text;
begin
    perform pg_advisory_xact_lock(hashtext('email_partitions_make'));
    foreach parent in array array['email_log', 'email_content', 'email_attachment', 'email_attempt'] loop
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

-- No insert ever fails for want of a partition.
create table email_log_default partition of email_log default;
create table email_content_default partition of email_content default;
create table email_attachment_default partition of email_attachment default;
create table email_attempt_default partition of email_attempt default;
select email_partition_tune('email_log_default');
