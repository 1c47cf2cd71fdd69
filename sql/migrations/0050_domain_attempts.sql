-- Workers share the measured length of attempts to a domain. So the emails that wait for the domain's ceilings become
-- due at the pace that the domain's servers allow. See docs/decisions/0057-measured-paces.md.

alter table domain_limit add column attempt_seconds double precision;

comment on column domain_limit.attempt_seconds is
    'The mean length of the latest attempts of all workers; null: none was measured yet.';
