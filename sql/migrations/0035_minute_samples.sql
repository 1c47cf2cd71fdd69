-- What the operators' page shows and no other table contains: figures per minute, the processes of each host, and what the
-- last check of the DLQ found. The monitors write these rows; no email's path writes them.

-- One row per minute for the whole database. The difference of two rows is the rate.
create table minute_sample (
    minute timestamptz not null,
    taken_at timestamptz not null,
    emails jsonb not null,
    oldest_pending_seconds double precision,
    longest_due_seconds double precision,
    queues jsonb,
    attempts jsonb not null,
    counted_since timestamptz not null,
    counted jsonb not null,
    constraint minute_sample_pkey primary key (minute)
) with (fillfactor = 50);

comment on column minute_sample.emails is 'The number of emails by status, without sent and cancelled.';
comment on column minute_sample.queues is 'Messages and consumers of each queue; null if RabbitMQ could not be read.';
comment on column minute_sample.attempts is 'Attempts by outcome, since the first sample; never less than in an earlier row.';
comment on column minute_sample.counted is
    'The sum of email_hourly by outcome from counted_since on. The next sample adds what has been counted since then.';

-- The last check of each DLQ, by the monitor that alerts.
create table alert_check (
    queue text not null,
    host text not null,
    checked_at timestamptz not null,
    depth bigint,
    fault text,
    alerts jsonb not null,
    constraint alert_check_pkey primary key (queue)
) with (fillfactor = 50);

comment on column alert_check.depth is 'Messages on the DLQ; null if RabbitMQ could not be read.';
comment on column alert_check.alerts is 'The active alerts: kind, raised_at, count, oldest_age_seconds, reason.';

alter table host_presence
    add column version text,
    add column processes jsonb;

comment on column host_presence.processes is
    'The processes of the host''s `dispatcher run`, as its monitor last reported them. Null: a release before 0035.';

-- To count dead letters and held emails, also of one tenant, however many emails failed because their recipients are
-- suppressed. Only failing, holding and deciding an email write it.
create index email_log_undecided on email_log (status, tenant_id, email_id)
    where status in ('failed', 'held')
        and dead_letter_discarded_at is null
        and error_type is distinct from 'suppressed';

-- As in 0029: the roles that may lease emails, or read providers' states, get their rights here.
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
        execute format('grant select, insert, update, delete on minute_sample to %s', grantee);
        execute format('grant select, insert, update on alert_check to %s', grantee);
    end loop;
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'provider_state'::regclass
            and acl.privilege_type = 'SELECT'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant select on minute_sample, alert_check, lane_policy to %s', grantee);
    end loop;
end
$$;
