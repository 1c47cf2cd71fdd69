-- An event may say more than it can prove. What it cannot prove is stored with it.

alter table email_event
    add column doubt text,
    add constraint email_event_doubt_known check (doubt in ('impossible', 'recipient'));

comment on column email_event.doubt is
    'Why the event is not believed. impossible: no worker can have sent the email through this provider, so the event proves nothing. recipient: nothing proves that the event is about this recipient, so it suppresses nobody. Null: there is no doubt.';

-- The monitor alerts if there are impossible events.
create index email_event_impossible on email_event (received_at) where doubt = 'impossible';
