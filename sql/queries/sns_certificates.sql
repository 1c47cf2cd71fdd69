-- The certificates of Amazon SNS that have verified a message (docs/events-setup.md).

-- name: list_sns_certificates
-- The newest certificates.
select url, pem
from dispatcher.sns_certificate
order by stored_at desc
limit %(limit)s;

-- name: store_sns_certificate
-- Stores a certificate, and deletes the oldest ones, so that at most `limit` remain. No rows.
with oldest as (
    delete from dispatcher.sns_certificate
    where url in (
        select url
        from dispatcher.sns_certificate
        where url <> %(url)s
        order by stored_at desc
        offset %(limit)s - 1
    )
)
insert into dispatcher.sns_certificate (url, pem)
values (%(url)s, %(pem)s)
on conflict (url) do update
set pem = excluded.pem, stored_at = excluded.stored_at;
