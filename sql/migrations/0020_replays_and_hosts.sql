-- Replays that meet over the same emails keep one pace together, and hosts that vanish are noticed.

-- An earlier release's runner keeps its own pace.
alter table email_replay
    add column paced_with bigint[] default '{}';

comment on column email_replay.paced_with is
    'Replays that ran over the same emails when this one began: together they keep the slowest pace. Null: it keeps its own.';

-- A row per monitor, renewed with each of its looks, and deleted when it stops in order.
create table host_presence (
    holder text not null,
    host text not null,
    seen_at timestamptz not null,
    constraint host_presence_pkey primary key (holder)
) with (fillfactor = 50);
