-- Recipients who get no email: addresses and domains, for each tenant.

create table suppression (
    suppression_id bigint generated always as identity,
    tenant_id text not null,
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
    constraint suppression_pkey primary key (suppression_id),
    constraint suppression_once unique (tenant_id, address_hash),
    constraint suppression_reason_known check (reason in ('hard_bounce', 'soft_bounce', 'complaint', 'unsubscribe', 'manual'))
);

comment on column suppression.address_hash is
    'HMAC of the address, or of the domain if is_domain, with dispatcher_database.address_key.';
comment on column suppression.masked is 'What an operator recognises: `j•••@example.com`, or the domain.';
comment on column suppression.source_email_id is 'The email whose event made the entry; null: a person or an import made it.';
comment on column suppression.expires_at is 'Null: never.';
comment on column suppression.changed_in is
    'The transaction that wrote the entry. Workers read the entries of transactions that they have not seen yet.';

create index suppression_changed on suppression (changed_in);
create index suppression_expires on suppression (expires_at) where expires_at is not null;

-- Workers read the entries before they send. So the roles that may lease emails get their rights here, and an upgrade
-- does not stop sending until an operator has run `dispatcher topology grants` again.
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
        execute format('grant select, insert, update, delete on suppression to %s', grantee);
    end loop;
end
$$;

-- Set for legal notices: the email goes to suppressed recipients, too.
alter table email_content add column ignore_suppression boolean not null default false;

alter table api_key drop constraint api_key_scopes_known;
alter table api_key add constraint api_key_scopes_known check (
    scopes <@ array['send', 'read', 'operate', 'ignore_suppression']
);
