-- Which history of PostgreSQL the relay goes on from: a promotion, or a restore to a point in time, begins a new timeline.

-- One row at most, written each second by the leading relay.
create table relay_timeline (
    is_only boolean not null default true,
    timeline integer not null,
    is_synchronous boolean not null,
    noted_at timestamptz not null default clock_timestamp(),
    uncertain_before timestamptz,
    doubted_at timestamptz,
    constraint relay_timeline_pkey primary key (is_only),
    constraint relay_timeline_is_only check (is_only)
) with (fillfactor = 50);

comment on column relay_timeline.is_synchronous is 'Commits waited for a standby when this was noted, so that its promotion loses none.';
comment on column relay_timeline.uncertain_before is
    'The last promotion lost commits: what was published by then may have been sent on the lost timeline. Null: none did.';
comment on column relay_timeline.doubted_at is 'When a relay found that.';
