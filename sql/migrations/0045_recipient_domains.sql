-- The ceilings of recipient domains, for the provider smtp. See docs/decisions/0053-recipient-domains.md.

create table domain_limit (
    domain text not null,
    per_second double precision,
    concurrent integer,
    tokens double precision not null default 0,
    refilled_at timestamptz not null default clock_timestamp(),
    holders jsonb not null default '{}',
    constraint domain_limit_pkey primary key (domain),
    constraint domain_limit_per_second_positive check (per_second > 0),
    constraint domain_limit_concurrent_positive check (concurrent > 0),
    constraint domain_limit_limits check (per_second is not null or concurrent is not null)
);

comment on column domain_limit.domain is 'In lower case, without subdomains; an internationalized domain as A-labels.';
comment on column domain_limit.per_second is 'The most emails per second, all hosts together; null: no limit.';
comment on column domain_limit.concurrent is 'The most attempts at the same time, all hosts together; null: no limit.';
comment on column domain_limit.tokens is 'The tokens in the bucket at refilled_at.';
comment on column domain_limit.holders is
    'By worker: how many attempts it may make at the same time (held), how many it wants, and until when (unix seconds).';

-- Emails that a ceiling puts aside wait in lines: one per domain, lane and tenant.
create table domain_line (
    domain text not null,
    lane text not null,
    tenant_id text not null,
    until_at timestamptz not null,
    constraint domain_line_pkey primary key (domain, lane, tenant_id)
);

comment on column domain_line.until_at is 'When the last email of the line becomes due.';

-- As in 0026: the new check allows everything that the old one allowed.
alter table email_log drop constraint email_log_wait_reason_known;
alter table email_log
    add column wait_domain text,
    add constraint email_log_wait_reason_known
        check (wait_reason in ('scheduled', 'redelivery', 'domain')) not valid;

comment on column email_log.wait_domain is 'The recipient domain for whose ceiling the email waits, or last waited.';

-- Empty unless a ceiling puts emails aside.
create index email_log_in_line on email_log (wait_domain, wait_until)
    where status = 'waiting' and wait_reason = 'domain';

-- As in 0026: the roles that may lease emails, or read their history, get their rights here.
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
        execute format('grant select, insert, update, delete on domain_limit, domain_line to %s', grantee);
    end loop;
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_event'::regclass
            and acl.privilege_type = 'SELECT'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant select on domain_limit to %s', grantee);
    end loop;
end
$$;
