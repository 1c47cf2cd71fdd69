-- An operator can end the wait of a worker's circuit breaker.
alter table provider_state add column resumed_at timestamptz;

comment on column provider_state.resumed_at is
    'When an operator resumed the provider. The worker clears it, and tries the provider again. Null: nothing to do.';
