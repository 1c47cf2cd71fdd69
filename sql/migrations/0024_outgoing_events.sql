-- What applications learn about their emails: a feed of events, which applications poll or get by webhook. Content and
-- addresses are in neither table.

-- Whether statements write the feed. It has one row. Statements that change emails read it once per batch, so it must
-- stay small: nothing else writes it often.
create table outgoing_feed (
    is_only boolean not null default true,
    is_on boolean not null default false,
    wanted_at timestamptz not null default 'epoch',
    constraint outgoing_feed_pkey primary key (is_only),
    constraint outgoing_feed_is_only check (is_only)
);

insert into outgoing_feed default values;

comment on column outgoing_feed.wanted_at is 'When an application last polled, within an hour, or when a webhook was last added.';

-- A UUIDv7 (RFC 9562): 48 bits of the time in milliseconds, then the random bits of a UUIDv4, with the version changed.
create function outgoing_event_id_make() returns uuid
language sql volatile
return encode(
    set_bit(
        set_bit(
            overlay(
                uuid_send(gen_random_uuid())
                placing substring(int8send(floor(extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                from 1 for 6
            ),
            52,
            1
        ),
        53,
        1
    ),
    'hex'
)::uuid;

create table outgoing_event (
    event_id uuid not null default outgoing_event_id_make(),
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
    constraint outgoing_event_pkey primary key (event_id),
    constraint outgoing_event_kind_known check (
        kind in ('sent', 'failed', 'held', 'delivered', 'bounced', 'complained', 'suppressed')
    )
);

-- Readers follow (made_in, position). A transaction that commits late has a lower made_in than others that committed
-- before. So a reader reads only below the oldest transaction that is still open, and then misses no event.
create unique index outgoing_event_feed on outgoing_event (made_in, position);

comment on column outgoing_event.event_id is 'The webhook-id: the same for each delivery and each receiver.';
comment on column outgoing_event.happened_at is 'By the provider''s clock; null: the event is a change of status.';

create table webhook (
    webhook_id bigint generated always as identity,
    url text not null,
    tenant_id text,
    kinds text[] not null,
    with_recipients boolean not null default false,
    secret text not null,
    previous_secret text,
    previous_until timestamptz not null default 'epoch',
    state text not null default 'active',
    made_in xid8 not null default pg_snapshot_xmin(pg_current_snapshot()),
    position bigint not null default 0,
    revision bigint not null default 0,
    failing_since timestamptz,
    next_attempt_at timestamptz not null default 'epoch',
    last_error text,
    delivered_at timestamptz,
    created_at timestamptz not null default clock_timestamp(),
    constraint webhook_pkey primary key (webhook_id),
    constraint webhook_state_known check (state in ('active', 'disabled'))
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

-- The statements of workers and relays read whether the feed is on. So the roles that may lease emails get their rights
-- here, as in 0023, and an upgrade does not stop sending until an operator has run `dispatcher topology grants` again.
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
        execute format('grant select, update on outgoing_feed to %s', grantee);
        execute format('grant select, insert, update, delete on outgoing_event, webhook, webhook_retry to %s', grantee);
    end loop;
end
$$;
