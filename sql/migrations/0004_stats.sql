-- Emails per hour, and per day in UTC, by tenant, lane, provider and first tag (docs/decisions/0089-statistics.md). A
-- monitor counts them: no statement that enqueues or sends writes here.
create table email_stat (
    is_day boolean not null,
    begins_at timestamptz not null,
    tenant_id text collate "C" not null,
    lane text collate "C" not null,
    provider text collate "C" not null,
    tag text collate "C" not null,
    sent integer not null,
    failed integer not null,
    suppressed integer not null,
    held integer not null,
    delivered integer not null,
    opened integer not null,
    clicked integer not null,
    unsubscribed integer not null,
    bounced integer not null,
    bounced_hard integer not null,
    bounced_soft integer not null,
    bounced_blocked integer not null,
    rejected integer not null,
    complained integer not null,
    constraint email_stat_pkey primary key (is_day, begins_at, tenant_id, lane, provider, tag)
) with (fillfactor = 50);
create index email_stat_tenant on email_stat (tenant_id, is_day, begins_at);
comment on column email_stat.tenant_id is '(other): all tenants whose rows were joined, because the hour or the day had too many rows.';
comment on column email_stat.tag is 'The first tag. (none): no tag, or the content was erased. (other): as for tenant_id.';
comment on column email_stat.failed is 'Emails that are failed, without those whose recipients are suppressed.';
comment on column email_stat.bounced is 'Sent emails with an event of this kind, as in every column from `delivered` on.';

-- An email that was read before it was sent, and what it counted as. Deleted when the email is sent or pruned.
create table email_stat_open (
    email_id uuid primary key,
    counted text not null,
    hour timestamptz not null,
    provider text not null,
    tag text not null
) with (fillfactor = 50);

-- One row: how far the emails and the events are counted. Changed in the commit that changes the counts.
create table email_stat_progress (
    is_only boolean primary key default true constraint email_stat_progress_is_only check (is_only),
    first_id uuid not null,
    read_id uuid not null,
    checked_id uuid not null default '00000000-0000-0000-0000-000000000000',
    events_until timestamptz not null default clock_timestamp(),
    stored_until timestamptz not null default '-infinity',
    next_until timestamptz,
    next_xid xid8
) with (fillfactor = 50);
comment on column email_stat_progress.first_id is 'Emails with lower ids are not counted: they are older than the table by a week or more.';
comment on column email_stat_progress.checked_id is 'Of email_stat_open, the last row that was checked.';
comment on column email_stat_progress.stored_until is 'Each transaction that began until then has ended, so all its rows are visible.';
comment on column email_stat_progress.next_until is 'The next stored_until, as soon as all transactions before next_xid have ended.';
insert into email_stat_progress (first_id, read_id)
select first_id, first_id
from (select email_id_lowest_at(date_trunc('day', clock_timestamp() - interval '7 days', 'UTC')) as first_id) as week;
