-- name: count_unfinished
-- Emails by status, `sent` left out: the partial index holds no more than these.
select status, count(*)
from email_log
where status <> 'sent'
group by status;

-- name: count_sent
-- Emails ever sent, from the hourly counts, so that it never scans.
select coalesce(sum(email_count), 0)::bigint
from email_hourly
where outcome = 'accepted';

-- name: find_oldest_pending
-- Age in seconds of the oldest pending email and of the longest due one; null where there is none.
select
    (
        select extract(epoch from clock_timestamp() - created_at)::double precision
        from email_log
        where status = 'pending'
        order by email_id
        limit 1
    ),
    (
        select extract(epoch from clock_timestamp() - publish_due_at)::double precision
        from email_log
        where publish_due_at is not null
        order by publish_due_at
        limit 1
    );

-- name: count_sent_recently
-- Emails sent in the last hour and in the last 24: an hour that lies partly within counts by that part.
select
    coalesce(sum(email_count * greatest(0, least(1, extract(epoch from hour + interval '1 hour' - (now() - interval '1 hour')) / 3600))), 0)::double precision,
    coalesce(sum(email_count * greatest(0, least(1, extract(epoch from hour + interval '1 hour' - (now() - interval '1 day')) / 3600))), 0)::double precision
from email_hourly
where outcome = 'accepted'
    and hour > now() - interval '26 hours';
