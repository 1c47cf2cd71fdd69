-- What operators do: replays, and a record of every act that no row may lose again.

alter table email_log
    add column attempt_base integer not null default 0,
    add column dead_letter_discarded_at timestamptz;

comment on column email_log.attempt_base is 'attempt_count at the last replay: attempts count towards the maximum from here.';
comment on column email_log.dead_letter_discarded_at is 'A person took its dead letter off the DLQ for good; null again after a replay.';

-- A batch of emails that a person wants sent again. Which ones is settled when it is made: email_replay_item.
create table email_replay (
    replay_id bigint generated always as identity,
    state text not null default 'running',
    source text not null,
    selection jsonb not null,
    include_held boolean not null,
    per_second double precision,
    actor text not null,
    reason text not null,
    created_at timestamptz not null default clock_timestamp(),
    changed_at timestamptz not null default clock_timestamp(),
    constraint email_replay_pkey primary key (replay_id),
    constraint email_replay_state_known check (state in ('running', 'stopped', 'done'))
);

comment on column email_replay.state is 'Whether it may go on; whether somebody is at it shows in the advisory lock on its id.';

create table email_replay_item (
    replay_id bigint not null,
    email_id uuid not null,
    outcome text,
    settled_at timestamptz,
    constraint email_replay_item_pkey primary key (replay_id, email_id)
);

comment on column email_replay_item.outcome is 'Null while it waits for its turn.';

create index email_replay_item_waiting on email_replay_item (replay_id, email_id) where outcome is null;
create index email_replay_item_email on email_replay_item (email_id);

-- Append-only: who did what to which email, when and why. Holds no address but what an actor calls himself.
create table operator_audit (
    audit_id bigint generated always as identity,
    acted_at timestamptz not null default clock_timestamp(),
    actor text not null,
    action text not null,
    reason text,
    email_id uuid,
    replay_id bigint,
    detail jsonb,
    constraint operator_audit_pkey primary key (audit_id)
);

create index operator_audit_email on operator_audit (email_id) where email_id is not null;

create function operator_audit_keep() returns trigger
language plpgsql as $$
begin
    if coalesce(current_setting('dispatcher.prune_audit', true), '') <> 'on' then
        raise exception 'operator_audit is append-only'
            using hint = 'Retention sets dispatcher.prune_audit to on in its own session.';
    end if;
    return null;
end
$$;

create trigger operator_audit_keep
before update or delete or truncate on operator_audit
for each statement execute function operator_audit_keep();
