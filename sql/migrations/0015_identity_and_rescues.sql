-- What a host that comes back has to know: which database this is, and which of its leases were taken away meanwhile.

-- One row, made at random by the first `init`. An in-flight ledger carries it, so that no relay settles the ledger of
-- another database. A copy of the database (a dump, a base backup, a standby) has the same identity.
create table dispatcher_database (
    is_only boolean not null default true,
    database_id uuid not null default gen_random_uuid(),
    constraint dispatcher_database_pkey primary key (is_only),
    constraint dispatcher_database_is_only check (is_only)
);
insert into dispatcher_database default values;

-- An email that the rescue held: whose lease it took away, under which token, and whether the email was in doubt before.
-- As long as lease_token is rescued_token + 1, nobody has touched the rescue.
alter table email_log
    add column rescued_from text,
    add column rescued_token bigint,
    add column rescued_in_doubt boolean;

comment on column email_log.rescued_from is 'The worker whose expired lease the rescue took away when it held the email.';
comment on column email_log.rescued_token is
    'The token of that lease. Null once its worker has recorded an uncertain attempt under it: then nothing undoes the rescue.';
comment on column email_log.rescued_in_doubt is 'was_uncertain before that rescue.';
