-- What the protocol knows of an email besides its status: whether it may have arrived, and whether it kills workers.
-- Neither is indexed, so that leases and results stay HOT.
alter table email_log add column was_uncertain boolean not null default false;
alter table email_log add column crash_count smallint not null default 0;

comment on column email_log.was_uncertain is
    'An attempt may have left without an answer: whatever the status says of later ones, it may have been accepted.';
comment on column email_log.crash_count is 'Workers that died while they rendered it.';
