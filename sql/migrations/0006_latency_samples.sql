-- The latency of the newest sent emails, in each sample of a minute. Null: an earlier release wrote the sample, or nothing
-- was sent.
alter table minute_sample
    add column p50_seconds double precision,
    add column p99_seconds double precision;
