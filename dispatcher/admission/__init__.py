"""What the HTTP API and the SMTP server share: who may enqueue what and how much, and how emails are enqueued.

access.py                API keys, their rights and rates; quotas.py: their recipients per day
fair_limiter.py          gives one caller at most half of each limit
validation.py            the rules for an email: of `dispatcher.domain`, policy.py and the key
problems.py              every reason to refuse a request
enqueueing.py            enqueues within the quota, through insert_batcher.py: many emails with one statement
immediate_publisher.py   publishes the emails' messages; if that fails, the relay publishes them
"""
