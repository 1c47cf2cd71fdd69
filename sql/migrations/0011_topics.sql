-- Topics of consent (docs/decisions/0095-topics.md). With email_log, because the topic of an email outlives its content: a
-- link to unsubscribe names the email, and works as long as this row exists.
alter table email_log add column topic text;
comment on column email_log.topic is 'What a recipient can leave, such as newsletter. Null: only entries without topic suppress its recipients.';

-- The address_hash of an entry with a topic is a hash of the recipient's hash and the topic. So the unique key contains the
-- topic, one look-up finds both kinds of entries, and the statements of the release before stay valid.
alter table suppression add column topic text, add column recipient_hash bytea;
comment on column suppression.topic is 'Null: the entry suppresses emails of every topic, and emails without topic.';
comment on column suppression.recipient_hash is 'The HMAC of the address or the domain, if there is a topic. Null: it is the address_hash.';
create index suppression_of_recipient on suppression (tenant_id, recipient_hash) where recipient_hash is not null;
