-- What providers report after they accepted an email: delivered, bounced, complained about. An event proves that the
-- provider accepted the email, so it settles an email whose outcome was unknown.

-- Addresses in events and suppressions are stored as hashes with this key. Without the key, an address cannot be tested
-- against a hash. The key is random for each database; a copy of the database has the same key.
alter table dispatcher_database
    add column address_key bytea not null default uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());

create table email_event (
    email_id uuid not null,
    event_key bytea not null,
    provider text not null,
    kind text not null,
    bounce text,
    address_hash bytea,
    code text,
    detail text,
    happened_at timestamptz not null,
    received_at timestamptz not null default clock_timestamp(),
    constraint email_event_pkey primary key (email_id, event_key),
    constraint email_event_kind_known check (
        kind in (
            'accepted', 'delivered', 'deferred', 'bounced', 'complained', 'rejected', 'unsubscribed', 'opened', 'clicked'
        )
    ),
    constraint email_event_bounce_known check ((bounce in ('hard', 'soft', 'blocked')) = (kind = 'bounced'))
) partition by range (email_id);

comment on column email_event.event_key is
    'A hash of what the event says (domain/provider_event.py), because a provider may repeat an event under a new event id.';
comment on column email_event.address_hash is 'HMAC of the recipient with dispatcher_database.address_key; null: the event has no recipient.';
comment on column email_event.happened_at is 'By the provider''s clock.';

create table email_event_default partition of email_event default;
create index email_event_address on email_event (address_hash) where address_hash is not null;

-- An event may arrive before the worker has recorded its result. Then this mark waits in the row: the email is not leased
-- again, and becomes `sent` as soon as its lease has ended.
alter table email_log add column proven_by text;

comment on column email_log.proven_by is 'The provider whose event proved that it accepted the email.';

create index email_log_proven on email_log (email_id) where proven_by is not null and status <> 'sent';

-- As in 0001 and 0018, and now for the events, too.
create or replace function email_partitions_make(at timestamptz, weeks_ahead integer) returns setof text
language plpgsql
security definer
set search_path from current
as $$
declare
    parent text;
    week timestamp;
    name text;
begin
    perform pg_advisory_xact_lock(hashtext('email_partitions_make'));
    foreach parent in array array['email_log', 'email_content', 'email_attachment', 'email_attempt', 'email_event'] loop
        for step in 0..weeks_ahead loop
            week := date_trunc('week', at at time zone 'UTC') + step * interval '1 week';
            name := parent || to_char(week, '"_p"YYYYMMDD');
            if to_regclass(quote_ident(name)) is null then
                perform email_partition_make(
                    parent,
                    name,
                    email_id_lowest_at(week at time zone 'UTC'),
                    email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
                );
                return next name;
            end if;
        end loop;
    end loop;
end
$$;
