-- Keys of mode test: what they enqueue has the channel `test`, for which no provider exists, and never leaves.
alter table api_key add column is_test boolean not null default false;
comment on column api_key.is_test is 'What the key enqueues never leaves: workers simulate the outcome.';
comment on column email_log.channel is 'Null: an email. sms: an SMS, whose recipient is a phone number. test: an email or SMS of a test key, which never leaves.';
-- So that the doctor notices a host that sends what another host keeps back.
alter table host_presence add column recipients text;
comment on column host_presence.recipients is 'A digest of DISPATCHER_ALLOW_RECIPIENTS and DISPATCHER_REDIRECT_TO of this host; empty: neither is set. Null: not reported.';
