-- What strangers can ask for is limited, and what was proven before is kept. See docs/decisions/0068-shares-of-tenants.md.

-- The certificates of Amazon SNS that have verified a message of an allowed topic. A new process needs no fetch for them.
create table sns_certificate (
    url text collate "C" not null,
    pem text not null,
    stored_at timestamptz not null default clock_timestamp(),
    constraint sns_certificate_pkey primary key (url)
);

-- Sign-ins with OpenID Connect that have come back from the issuer. Each comes back once, at any host.
create table ops_sign_in (
    state_hash bytea not null,
    used_at timestamptz not null default clock_timestamp(),
    constraint ops_sign_in_pkey primary key (state_hash)
);

-- Tenants read this text, so it has neither the operator's host nor an address. The audit log has them.
update webhook
set last_error = regexp_replace(last_error, ' \([^()]*@[^()]*\)$|@.*$', '')
where state = 'disabled'
    and last_error like 'disabled by %@%';

-- As in 0026: the roles that may lease emails get their rights here.
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
        execute format('grant select, insert, update, delete on sns_certificate to %s', grantee);
        execute format('grant select, insert, delete on ops_sign_in to %s', grantee);
    end loop;
end
$$;
