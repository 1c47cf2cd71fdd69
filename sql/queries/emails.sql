-- part: is_given
-- Whether an email is one of the given ones. With the lowest and the highest id, PostgreSQL skips the weekly partitions
-- that contain none of them.
email_id = any(%(email_ids)s) and email_id between %(lowest_id)s and %(highest_id)s

-- part: is_e_given
-- As is_given, for the email `e`.
e.email_id = any(%(email_ids)s) and e.email_id between %(lowest_id)s and %(highest_id)s

-- name: find_recipients
-- The addresses of emails, as lists under "to", "cc" and "bcc". No row for an email whose content was deleted.
select email_id, recipients
from dispatcher.email_content
where {is_given};

-- name: find_recipient_hashes
-- The first 6 bytes of the hash of each recipient, also of emails whose content was deleted. Takes some milliseconds per
-- email in a large table, because the index is small and inexact. No row: the recipient was erased.
select email_id, array_agg(address_hash)
from dispatcher.email_recipient
where {is_given}
group by email_id;
