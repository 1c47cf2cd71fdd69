-- Finds lost messages per lane, among emails that were published and not leased. A lease usually clears the due mark in
-- the write that leases the email, so few emails enter this index. It is small however many emails are due.
create index email_log_unleased on email_log (lane, published_at) where status = 'pending' and publish_due_at is null;
