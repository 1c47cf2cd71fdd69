-- The delivery state of an email: what the events of its recipients say, beside its status
-- (docs/decisions/0088-delivery-state.md). The words are in the order of `email_delivery`, so the worse one is greater.
create type email_delivery as enum (
    'delayed', 'delivered', 'opened', 'clicked', 'unsubscribed', 'bounced_soft', 'bounced_blocked', 'rejected',
    'bounced_hard', 'complained'
);

-- No index contains the column, so that an event updates the row in its page (HOT).
alter table email_log add column delivery email_delivery;
comment on column email_log.delivery is 'The greatest of what its believed events say. Null: no event says whether it arrived.';

-- Emails in a rare delivery state are found by the events that put them into it.
create index email_event_trouble on email_event (kind, email_id)
    where kind in ('deferred', 'bounced', 'complained', 'rejected');

-- What an event of a provider says about delivery. Null: nothing, as `accepted` says. Every branch is a constant, so that
-- PostgreSQL can inline the function: to call it, or to convert a text, would take longer than to store the state.
create function email_delivery_of(kind text, bounce text) returns email_delivery
language sql immutable parallel safe
return case kind
    when 'delivered' then 'delivered'::email_delivery
    when 'opened' then 'opened'::email_delivery
    when 'clicked' then 'clicked'::email_delivery
    when 'deferred' then 'delayed'::email_delivery
    when 'rejected' then 'rejected'::email_delivery
    when 'complained' then 'complained'::email_delivery
    when 'unsubscribed' then 'unsubscribed'::email_delivery
    when 'bounced' then case bounce
        when 'hard' then 'bounced_hard'::email_delivery
        when 'blocked' then 'bounced_blocked'::email_delivery
        else 'bounced_soft'::email_delivery
    end
end;

-- Events that an earlier release stores change no delivery state. `DeliveryBackfill` reads them in the order in which
-- they were stored. A row: until when it has read them, and until when it goes on, because hosts of an earlier
-- release may still store events. No row: it has ended.
create table delivery_backfill (
    is_only boolean primary key default true constraint delivery_backfill_is_only check (is_only),
    read_until timestamptz not null,
    lasts_until timestamptz not null default clock_timestamp() + interval '1 day'
);
insert into delivery_backfill (read_until)
select coalesce(min(received_at), clock_timestamp())
from email_event
having min(received_at) is not null
    or exists (select from host_presence);

-- Every kind of event that is stored is announced to those who subscribe to it.
alter table outgoing_event drop constraint outgoing_event_kind_known;
alter table outgoing_event add constraint outgoing_event_kind_known check (
    kind in (
        'sent', 'failed', 'held', 'delivered', 'bounced', 'complained', 'suppressed', 'cancelled', 'delayed', 'rejected',
        'opened', 'clicked', 'unsubscribed'
    )
) not valid;
