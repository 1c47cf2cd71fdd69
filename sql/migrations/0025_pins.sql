-- A provider with idempotency keys may have accepted an email, and the email will be tried again at that provider only,
-- with the same key.
alter table email_log add column pinned_at timestamptz;

comment on column email_log.pinned_at is
    'When the first attempt whose outcome is unknown began; until its idempotency key expires, only `provider` may be tried. Null: any provider.';
