-- The outbox carries messages of other channels, such as SMS, beside emails. Their recipients are not email addresses.

alter table email_log add column channel text;

comment on column email_log.channel is 'Null: an email. sms: an SMS, whose recipient is a phone number.';

-- Messages whose end is unknown are polled by the time since which they are sent or held (see polling.sql). Emails are
-- not in this index.
create index email_log_polled on email_log (coalesce(sent_at, settled_at))
    where channel is not null and status in ('sent', 'held');

-- The SMS from recipients that were handled. A provider signs its requests without a time, so a copy of an old request is
-- recognised by its message.
create table inbound_message (
    message_id text not null,
    received_at timestamptz not null default clock_timestamp(),
    constraint inbound_message_pkey primary key (message_id)
);
