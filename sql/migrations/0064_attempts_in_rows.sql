-- An acceptance ends an email's last attempt, because `sent` is final. So the email's own row can contain this attempt,
-- and an email that is accepted at once needs no row in email_attempt. See docs/decisions/0079-attempts-in-rows.md.
alter table email_log
    add column attempt_worker text,
    add column attempt_started_at timestamptz,
    add column attempt_finished_at timestamptz;

comment on column email_log.attempt_worker is
    'Not null: this row contains the attempt with the number attempt_count, which was accepted. See the view every_attempt.';

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

comment on view every_attempt is
    'Every attempt, in whichever table it is. A producer may insert any row, so an attempt that lacks a value, or whose times Python cannot represent, does not count.';

do $$
declare
    grantee text;
begin
    for grantee in
        select distinct case acl.grantee when 0 then 'public' else acl.grantee::regrole::text end
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_attempt'::regclass
            and acl.privilege_type = 'SELECT'
            and acl.grantee <> current_user::text::regrole
    loop
        execute format('grant select on every_attempt to %s', grantee);
    end loop;
end
$$;
