-- Who may ask the HTTP API for what.

-- A key's secret is 32 random bytes, so one round of SHA-256 keeps it: there is no password to guess.
create table api_key (
    key_id text not null,
    tenant_id text not null,
    name text not null,
    secret_hash bytea not null,
    scopes text[] not null,
    sender_domains text[],
    sender_addresses text[],
    requests_per_second double precision,
    recipients_per_day integer,
    created_at timestamptz not null default clock_timestamp(),
    revoked_at timestamptz,
    constraint api_key_pkey primary key (key_id),
    constraint api_key_scopes_known check (scopes <@ array['send', 'read', 'operate'])
);

comment on column api_key.sender_domains is 'Both lists null: it may send from any address. Otherwise from what one of them names.';
comment on column api_key.recipients_per_day is 'Null: no quota.';

-- How many recipients a key has used of its quota; a row per key and day (UTC).
create table api_key_day (
    key_id text not null,
    day date not null,
    recipient_count integer not null,
    constraint api_key_day_pkey primary key (key_id, day)
) with (fillfactor = 50);
