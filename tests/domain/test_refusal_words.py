"""Public texts of mail servers, and whose fault each of them reports."""

from __future__ import annotations

import pytest

from dispatcher.domain.outcome import AccountFault
from dispatcher.domain.provider_text import HOST, LOGIN, QUOTA, RELAY, SEND_AS, SENDER, STOPPED, Cause, cause_of
from dispatcher.transport.smtp_replies import reply_of

TEXTS: dict[Cause | AccountFault | None, tuple[str, ...]] = {
    QUOTA: (  # used up what the account may send in a time
        "450 4.2.1 Peak SMTP relay limit exceeded for customer. This is a temporary error. - gsmtp",
        "554 5.2.0 STOREDRV.Submission.Exception:SubmissionQuotaExceededException; Failed to process",  # Exchange
        "550 5.7.705 Access denied, tenant has exceeded threshold",
        "452 Sender has exceeded the limit of 200 messages per hour",  # Exim
        "550 User has exceeded outgoing email quota",
        "451 4.7.1 Hourly limit exceeded",
        "450 4.7.1 <ann@example.org>: Recipient address rejected: Policy Rejection- Quota Exceeded.",
        "550 5.7.0 Number of messages sent exceeds the limit of 500 in 24 hours",  # Yahoo
        "554 5.7.1 You have sent too many messages in the last hour",  # Strato
        "451 4.5.3 Recipients per day limit exceeded for this sender",
        "451 Authentication failed: Maximum credits exceeded",  # SendGrid
    ),
    Cause.RATE: (
        "450 4.7.1 Error: too much mail from 192.0.2.1",  # Postfix
        "432 4.3.2 STOREDRV.ClientSubmit; sender thread limit exceeded",  # Exchange
        "421 4.7.0 [TSS04] Messages from 192.0.2.1 temporarily deferred due to user complaints",  # Yahoo
        "451 4.7.500 Server busy. Please try again later from [192.0.2.1].",
        "421 4.4.5 Server busy, try again later",
        "450 4.7.1 Requested action aborted: sending rate limit",
        "421 4.7.0 Too many messages for this session",
        "450 4.7.1 You are sending too fast",
        "550 Message rate exceeded",
    ),
    STOPPED: (
        "550 5.7.1 Sending paused for this account. For more information, please check the inbox",  # Amazon SES
        "550 Outgoing mail from example.com has been suspended",  # cPanel
        "550 5.7.1 Domain example.com is not allowed to send: Please activate your Mailgun account",
        "550 5.7.1 Payment required for this account",
        "403 You can only send testing emails to your own email address",  # Resend
        "550 Sandbox subdomains are for test purposes only. Please add your own domain",  # Mailgun
        "550 5.7.501 Access denied, spam abuse detected",  # Exchange
        "550 5.7.708 Service unavailable. Access denied, traffic not accepted from this IP",
        "550 5.7.1 Your account is blocked for sending spam",  # OVH
    ),
    LOGIN: (  # not logged in
        "550 Unauthenticated senders not allowed",  # SendGrid
        "550 SMTP AUTH is required for message submission on port 587",  # Exim
        "550 5.7.1 Authentication required",
        "503 You must authenticate",
        "550 5.7.0 Must issue a STARTTLS command first",
    ),
    RELAY: (
        "554 5.7.1 <ann@example.org>: Relay access denied",  # Postfix
        "550 5.7.1 <ann@example.org>... Relaying denied. IP name lookup failed [192.0.2.1]",  # Sendmail
        "550 relay not permitted",  # Exim
        "550 5.7.1 Unable to relay for ann@example.org",  # Exchange
        "553 sorry, that domain isn't in my list of allowed rcpthosts (#5.7.1)",  # qmail
        "553 Sender is not allowed to relay emails",  # Zoho
    ),
    HOST: (
        "550 5.7.1 Client host rejected: cannot find your hostname",
        "550 5.7.606 Access denied, banned sending IP [192.0.2.1]",  # Exchange
        "504 5.5.2 <localhost>: Helo command rejected: need fully-qualified hostname",  # Postfix
        "550 Your host is on our blacklist",
        "554 Your IP 192.0.2.1 has been blocked for spam",
    ),
    SENDER: (
        "550 5.7.1 Client does not have permissions to send as this sender",
        "550 5.1.8 Access denied, bad outbound sender AS(42003)",
        "501 mail from address must be same as authorization user",  # qq.com
        "550 5.7.1 Unauthenticated email from example.com is not accepted due to domain's DMARC policy.",
        "403 The example.org domain is not verified. Please, add and verify your domain",  # Resend
        "550 5.7.1 Sender domain not permitted",
    ),
    SEND_AS: (  # Exchange
        "550 5.7.60 SMTP; Client does not have permissions to send as this sender",
        "554 5.2.252 SendAsDenied; billing@example.com not allowed to send as news@example.com",
    ),
    Cause.RECIPIENT: (
        "550 no such user",
        "550 Unknown user",
        "550 Unrouteable address",  # Exim
        "550 Requested action not taken: mailbox unavailable",
        "554 delivery error: dd This user doesn't have a yahoo.com account",  # Yahoo
        "552 Mailbox quota exceeded",
        "554 5.7.1 Rejected by the recipient's spam policy",
        "554 5.7.1 Message blocked due to recipient policy",
    ),
    None: (  # the words do not show it
        "550 5.7.1 Our system has detected that this message is likely unsolicited mail.",
        "554 5.7.9 Message not accepted for policy reasons.",
        "550 no",
        "554 5.7.1 spam: too many links",
        "554 5.7.1 Message rejected: suspicious payment link",
        "500 5.5.1 Too many bad commands",
        "451 4.3.0 recipient address lookup failed <unverified-1@relay-denied.example>",
        "550 5.7.1 daily-quota-exceeded@spamhaus.example: no",
        "550 5.7.1 Access denied",
        "554 Transaction failed",
        "452 4.5.3 Too many recipients",
        "552 5.3.4 Message size exceeds fixed limit",
        "552 5.3.4 Your message exceeded Google's message size limits.",
        "554 5.4.6 Too many hops",
        "451 4.3.0 Temporary lookup failure",
        "452 4.3.1 Insufficient system storage",
    ),
}


@pytest.mark.parametrize(("cause", "text"), [(cause, text) for cause, texts in TEXTS.items() for text in texts])
def test_a_servers_words_show_whose_fault_a_refusal_is(cause: Cause | AccountFault | None, text: str) -> None:
    reply = reply_of(int(text[:3]), text[4:])
    found = cause_of(reply.text, reply.enhanced)

    assert (found.remedy if isinstance(found, AccountFault) else found) == (
        cause.remedy if isinstance(cause, AccountFault) else cause
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Daily user sending limit exceeded", 3600),
        ("exceeded the max emails per hour", 3600),
        ("Sending limit reached: 30 messages per minute", 60),
        ("Daily quota exceeded, try again in 15 minutes", 900),
        ("Daily quota exceeded, try again after 24 hours", 3600),
        ("Daily quota exceeded, try again in 0 seconds", 3600),
    ],
)
def test_a_quota_stops_the_provider_for_the_time_that_it_names_but_at_most_an_hour(text: str, seconds: float) -> None:
    found = cause_of(text)

    assert isinstance(found, AccountFault)
    assert found.seconds == seconds


def test_a_text_of_any_length_takes_little_time() -> None:
    assert cause_of("account not from limit " * 100_000) is not None
