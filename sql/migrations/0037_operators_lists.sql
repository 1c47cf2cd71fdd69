-- Indexes for lists that operators page through, newest first. Rows arrive in about this order, so each insert appends to
-- the index.

create index email_event_received on email_event (received_at);
create index suppression_listed on suppression (tenant_id, created_at, suppression_id);
