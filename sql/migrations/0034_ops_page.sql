-- Who is signed in to the operators' page, and API keys for all tenants.

-- Null: the key may act for every tenant. A request with such a key names its tenant, where it needs one.
alter table api_key alter column tenant_id drop not null;

comment on column api_key.tenant_id is 'Null: the key acts for every tenant.';

-- A browser that is signed in to the operators' page. Only the hash of its token is stored. The rights are those of its
-- API key. A person who has signed in with OpenID Connect has no key: then the row has the rights.
create table ops_session (
    token_hash bytea not null,
    key_id text,
    name text not null,
    tenant_id text,
    may_act boolean not null,
    created_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp(),
    constraint ops_session_pkey primary key (token_hash)
);

create index ops_session_created on ops_session (created_at);
