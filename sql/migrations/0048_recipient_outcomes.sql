-- An email that is delivered in several SMTP transactions: who has it already.

alter table email_log add column recipient_outcomes jsonb;

comment on column email_log.recipient_outcomes is
    'The recipients who need no further attempt, by position over to, cc and bcc: null if a provider accepted the email for this recipient, otherwise the code with which the provider refused the recipient for good. Null: every attempt concerned all recipients. If not null, attempt_base is greater than 0.';
comment on column email_log.attempt_base is
    'attempt_count at the last replay, redelivery or partial delivery: attempts count towards the maximum from here.';
