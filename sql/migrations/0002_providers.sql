-- What workers on all hosts have to agree on about a provider: its rate, and whether it can be used.

-- One token bucket per provider that has a ceiling. Workers take tokens in chunks, so a row is written some ten times a
-- second per worker, not once per email.
create table provider_rate (
    provider text not null,
    per_second double precision not null,
    tokens double precision not null,
    refilled_at timestamptz not null,
    halved_at timestamptz not null default 'epoch',
    constraint provider_rate_pkey primary key (provider)
) with (fillfactor = 50);

comment on column provider_rate.per_second is 'The rate now: the ceiling, or less after the provider throttled us.';

-- A worker slot's view of a provider, written when it changes. A row that is not closed and not renewed is old news.
create table provider_state (
    provider text not null,
    slot text not null,
    state text not null,
    reason text,
    changed_at timestamptz not null default clock_timestamp(),
    until_at timestamptz,
    constraint provider_state_pkey primary key (provider, slot),
    constraint provider_state_known check (state in ('closed', 'paused', 'open', 'half_open'))
) with (fillfactor = 50);
