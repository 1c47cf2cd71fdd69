#!/bin/sh
# Enqueues emails over HTTP. First start the API: DISPATCHER_API_ALLOW_ANONYMOUS=on dispatcher api
# Or use a key, as in production: DISPATCHER_API_KEY=$(dispatcher keys create --name curl --from-domain example.com)
set -eu

api=${DISPATCHER_API_URL:-http://127.0.0.1:8025}
ask() { curl --silent --show-error --fail-with-body ${DISPATCHER_API_KEY:+-H "Authorization: Bearer $DISPATCHER_API_KEY"} "$@"; echo; }

# The key is your own name for the email. If you run this twice, the email is sent once.
ask "$api/v1/emails" -H 'Content-Type: application/json' -H 'Idempotency-Key: order-17-receipt' -d '{
    "from": "Shop <shop@example.com>",
    "to": ["ann@example.org"],
    "subject": "Your receipt",
    "text": "Thank you for your order."
}'

# Many emails in one request. Each email gets a separate result.
ask "$api/v1/emails/batch" -H 'Content-Type: application/json' -d '{"emails": [
    {"message_key": "order-18-receipt", "from": "shop@example.com", "to": "bob@example.org", "subject": "Your receipt", "text": "Thanks."},
    {"message_key": "order-19-receipt", "from": "shop@example.com", "to": "cid@example.org", "subject": "Your receipt", "text": "Thanks."}
]}'

# The status of the first email.
ask "$api/v1/emails/by-key/order-17-receipt"
