-- When emails are sent, and in which order: schedules, expiry, cancellation, redelivery; lanes, tenants' shares, pauses.

-- `waiting`: not before wait_until. A status of its own, so that no statement of the release before publishes or leases
-- such an email: it leases only pending emails. `cancelled`: never to be sent.
-- The new check allows everything that the old one allowed, so PostgreSQL need not read the rows again (`not valid`).
alter table email_log drop constraint email_log_status_known;
alter table email_log add constraint email_log_status_known check (
    status in ('pending', 'waiting', 'sending', 'sent', 'failed', 'held', 'cancelled')
) not valid;

alter table email_log
    add column lane text not null default 'normal',
    add column wait_until timestamptz,
    add column wait_reason text,
    add column expires_at timestamptz,
    add column due_since timestamptz,
    add column max_attempts integer,
    add column redeliver_seconds double precision,
    add column redelivery_count integer not null default 0,
    add constraint email_log_wait_reason_known check (wait_reason in ('scheduled', 'redelivery')) not valid,
    add constraint email_log_waits check ((status = 'waiting') = (wait_until is not null)) not valid;

comment on column email_log.lane is 'Decides the send queue, and the share of workers and rates.';
comment on column email_log.wait_until is 'When a waiting email becomes pending and due; null unless it is waiting.';
comment on column email_log.wait_reason is 'Why a waiting email waits, or last waited.';
comment on column email_log.expires_at is 'From then on, no attempt begins, and the email is cancelled. Null: never.';
comment on column email_log.due_since is 'When the email could first be sent: its schedule, or its last replay. Null: created_at.';
comment on column email_log.max_attempts is 'From its lane when it was enqueued. Null: the setting of the host that sends.';
comment on column email_log.redeliver_seconds is
    'From its lane when it was enqueued: for how long after due_since a deferred email is tried again. Null: the setting of the host that sends.';
comment on column email_log.redelivery_count is 'How often the email has waited for a redelivery since due_since.';

create index email_log_waiting on email_log (wait_until) where status = 'waiting';
create index email_log_expiring on email_log (expires_at)
    where expires_at is not null and status in ('pending', 'waiting', 'held');
-- To publish in turns among tenants, even if one tenant has a million due emails.
create index email_log_due_by_tenant on email_log (lane, tenant_id, publish_due_at) where publish_due_at is not null;

-- As in 0017: a waiting email keeps its week, too.
create or replace function email_log_must_stay(from_id uuid, until_id uuid, undecided_since timestamptz) returns boolean
language sql stable
set search_path from current
as $$
    select
        exists (
            select from email_log
            where email_id >= from_id
                and email_id < until_id
                and status in ('pending', 'sending', 'waiting')
        )
        or exists (
            select from email_log
            where email_id >= from_id
                and email_id < until_id
                and status in ('failed', 'held')
                and dead_letter_discarded_at is null
                and created_at >= undecided_since
        )
$$;

-- What operators set, and every process reads about once per second.

create table lane_policy (
    lane text not null,
    weight double precision not null,
    on_uncertain text,
    max_attempts integer,
    redeliver_seconds double precision,
    constraint lane_policy_pkey primary key (lane),
    constraint lane_policy_weight_positive check (weight > 0),
    constraint lane_policy_on_uncertain_known check (on_uncertain in ('hold', 'resend'))
);

comment on column lane_policy.weight is 'Its share of workers and rates, relative to the other lanes that have emails.';
comment on column lane_policy.on_uncertain is 'For emails that set none of their own; null: the setting of the host.';

create table lane_rule (
    sender text not null,
    lane text not null,
    constraint lane_rule_pkey primary key (sender)
);

comment on column lane_rule.sender is 'An address, or a domain as `@example.com`, in lower case.';

create table tenant_limit (
    tenant_id text not null,
    weight double precision not null default 1,
    per_second double precision,
    constraint tenant_limit_pkey primary key (tenant_id),
    constraint tenant_limit_weight_positive check (weight > 0),
    constraint tenant_limit_per_second_positive check (per_second > 0)
);

comment on column tenant_limit.weight is 'Its share within a lane, relative to the other tenants that have due emails; 1 for others.';
comment on column tenant_limit.per_second is 'The most emails per second, all hosts together; null: no limit.';

create table pause (
    scope text not null,
    name text not null,
    until_at timestamptz,
    reason text not null,
    actor text not null,
    began_at timestamptz not null default clock_timestamp(),
    constraint pause_pkey primary key (scope, name),
    constraint pause_scope_known check (scope in ('all', 'lane', 'tenant', 'provider')),
    constraint pause_all_has_no_name check ((scope = 'all') = (name = ''))
);

comment on column pause.name is 'The lane, tenant or provider; empty for all.';
comment on column pause.until_at is 'Null: until `dispatcher resume`.';

alter table api_key
    add column lane text,
    add column allowed_lanes text[] not null default '{}';

comment on column api_key.lane is 'The lane of emails that name none. Null: by the sender''s rule, or normal.';
comment on column api_key.allowed_lanes is 'The lanes that an email may name, in addition to `lane`.';

alter table outgoing_event drop constraint outgoing_event_kind_known;
alter table outgoing_event add constraint outgoing_event_kind_known check (
    kind in ('sent', 'failed', 'held', 'delivered', 'bounced', 'complained', 'suppressed', 'cancelled')
);

-- As in 0023: the roles that may lease emails, or enqueue them, get their rights here.
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
        execute format('grant select, insert, update, delete on lane_policy, lane_rule, tenant_limit, pause to %s', grantee);
    end loop;
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_log'::regclass
            and acl.privilege_type = 'INSERT'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant select on lane_policy, lane_rule to %s', grantee);
    end loop;
end
$$;
