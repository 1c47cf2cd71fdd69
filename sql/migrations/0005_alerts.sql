-- What monitors on all hosts agree on about alerts: who looks, and what was told. Few rows, written once a minute.

-- One monitor looks at a DLQ and tells; the others stand by. It renews its hold each time that it looks.
create table alert_watch (
    queue text not null,
    holder text not null,
    held_until timestamptz not null,
    constraint alert_watch_pkey primary key (queue)
) with (fillfactor = 50);

-- A row per alert that stands, and per channel that has told it: no channel waits for another one. Its end, told, deletes it.
create table alert_told (
    queue text not null,
    kind text not null,
    channel text not null,
    raised_at timestamptz not null,
    told_at timestamptz not null,
    constraint alert_told_pkey primary key (queue, kind, channel)
) with (fillfactor = 50);

comment on column alert_told.told_at is 'When the channel last took it: raised, or a reminder.';
