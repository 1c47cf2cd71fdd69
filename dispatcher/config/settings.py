"""Every setting except providers' own settings; one field for each setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, FrozenInstanceError, field, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from dispatcher.config import event_values, values
from dispatcher.config.setting import setting
from dispatcher.domain.accounts import AccountRules, provider_of
from dispatcher.domain.lanes import DEFAULT_LANES, send_queue
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.suppression import AUTOMATIC
from dispatcher.domain.values import dataclass

if TYPE_CHECKING:
    from dispatcher.domain.sms import SmsRules

BUILT_IN: Final = values.built_in_providers()
SMS_PROVIDERS: Final = ("sms-capture", "twilio")
EMAIL_PROVIDERS: Final = tuple(name for name in BUILT_IN if name not in SMS_PROVIDERS)
EVENTS_FIELDS: Final = {
    "sendgrid": "sendgrid_events_keys",
    "ses": "ses_events_topics",
    "resend": "resend_events_secrets",
}
"""The settings with which providers' events are verified. An account can have its own."""
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("auto", "json", "text")
QUEUE_TYPES: Final = ("quorum", "classic")
MAX_BUNDLE_EMAILS: Final = 50
"""The most emails per bundle. Even with the longest message keys, the message of such a bundle is shorter than
`broker.pointer.MAX_BODY_OCTETS`."""

P = TypeVar("P", bound="ProviderSettings")

_ALLOWED_HEADERS: Final = (
    "X-*,List-*,In-Reply-To,References,Auto-Submitted,Precedence,Importance,Priority,Feedback-ID,Organization,Comments,"
    "Keywords"
)
_PROGRAM_EXTENSIONS: Final = (
    "ade,adp,apk,app,application,appref-ms,appx,appxbundle,asp,aspx,asx,bas,bat,bgi,cab,cdxml,cer,chm,cmd,cnt,com,"
    "cpl,crt,csh,der,diagcab,diagcfg,diagpkg,dll,dmg,ex,ex_,exe,fxp,gadget,grp,hlp,hpj,hta,htc,img,inf,ins,iso,isp,"
    "its,jar,jnlp,js,jse,ksh,lib,library-ms,lnk,mad,maf,mag,mam,maq,mar,mas,mat,mau,mav,maw,mcf,mda,mdb,mde,mdt,mdw,"
    "mdz,mht,mhtml,mjs,msc,msh,msh1,msh1xml,msh2,msh2xml,mshxml,msi,msix,msixbundle,msp,mst,msu,nsh,one,onepkg,"
    "onetoc2,ops,osd,pcd,pif,pl,plg,prf,prg,printerexport,ps1,ps1xml,ps2,ps2xml,psc1,psc2,psd1,psdm1,pssc,pst,py,pyc,"
    "pyo,pyw,pyz,pyzw,reg,scf,scr,sct,search-ms,settingcontent-ms,shb,shs,sys,theme,tmp,udl,url,vb,vbe,vbp,vbs,vhd,"
    "vhdx,vps,vsmacros,vss,vst,vsw,vxd,webpnp,website,ws,wsb,wsc,wsf,wsh,xbap,xll,xnk"
)
"""Extensions that Gmail, Outlook or Amazon SES refuse; and OneNote's, because OneNote files can contain programs."""
_MIB: Final = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """The settings that every provider has. A subclass adds one provider's settings: `DISPATCHER_<NAME>_<FIELD>`."""

    max_per_second: float | None = setting(
        values.rate,
        None,
        "The most emails per second for this provider, all workers and hosts together; unset: no limit. If a limit is "
        "set and the provider throttles us, the rate is halved, and recovers by itself.",
    )

    def max_connections(self, settings: Settings, /) -> int:
        """The most connections or files that one worker opens for this provider; at most DISPATCHER_PREFETCH."""
        return settings.prefetch

    def sender_countries(self) -> frozenset[str]:
        """The countries of the provider's default senders of SMS, as ISO 3166 codes; empty if they are unknown."""
        return frozenset()

    def doubts(self) -> list[str]:
        """Warnings of `dispatcher doctor` about settings that are valid, but may not suit this host."""
        return []

    def mistakes(self, _settings: Settings, /) -> list[str]:
        """A sentence for each contradiction among this provider's settings, or with the general settings."""
        return []


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one host, validated; one field per setting."""

    database_url: str = setting(
        values.database_url,
        None,
        "PostgreSQL, as a libpq URL or keywords; for several hosts: "
        "postgresql://…@a,b/db?target_session_attrs=read-write.",
        secret=True,
        empty="",
    )
    database_schema: str = setting(
        values.schema_name,
        "dispatcher",
        "The schema of the dispatcher's tables; `init` creates it. Set the same value for applications that use the "
        "library.",
    )
    amqp_url: str = setting(
        values.urls("amqp", "amqps"),
        None,
        "RabbitMQ, as an AMQP URL; for a cluster, the URLs of its nodes, comma-separated.",
        secret=True,
        empty="",
    )
    rabbitmq_management_url: str = setting(
        values.urls("http", "https"),
        None,
        "RabbitMQ's management API, as a URL with user and password; for a cluster, the URLs of its nodes, "
        "comma-separated.",
        secret=True,
        empty="",
    )
    exchange: str = setting(values.queue_name, "email.dispatcher", "The exchange to which the dispatcher publishes.")
    queue: str = setting(
        values.queue_name,
        "email.dispatcher.send",
        "The send queue of the lane `normal`. Its messages point to the emails to send.",
    )
    dlq: str = setting(values.queue_name, "email.dispatcher.dlq", "The queue of dead letters.")
    queue_type: str = setting(
        values.choice(*QUEUE_TYPES), "quorum", "The type of the queues that `init` declares: quorum or classic."
    )
    lanes: tuple[str, ...] = setting(
        values.lane_names,
        ",".join(DEFAULT_LANES),
        "The lanes, most urgent first, comma-separated; `normal` must be one of them. Each lane has its own send "
        "queue: DISPATCHER_QUEUE for `normal`, and DISPATCHER_QUEUE.LANE for any other lane. Use the same value on all "
        "hosts, and run `init` after a change.",
    )
    providers: tuple[str, ...] = setting(
        values.provider_names,
        None,
        f"Providers to send emails with, comma-separated, in order of preference: {', '.join(EMAIL_PROVIDERS)}, or a "
        "provider from an installed package; or accounts of providers, such as smtp:billing. No default.",
        empty=(),
    )
    account_rules: AccountRules = setting(
        values.account_rules,
        None,
        "Which emails use which accounts: `tenant=acme -> sendgrid:acme; sender=billing.example -> smtp:billing; "
        "lane=bulk -> ses:bulk`. The first rule that applies decides; emails without one use the accounts that no rule "
        "names. Use the same value on all hosts. See docs/providers-accounts.md.",
        empty=AccountRules(),
    )
    sms_providers: tuple[str, ...] = setting(
        values.provider_names,
        None,
        f"Providers to send SMS with, comma-separated, in order of preference: {', '.join(SMS_PROVIDERS)}. No default: "
        "an SMS waits until a host has a provider for it.",
        empty=(),
    )
    sms_max_segments: int = setting(
        values.whole(1, 24),
        "10",
        "The most segments of an SMS. Networks transmit an SMS in segments, and providers charge for each segment.",
    )
    sms_countries: frozenset[str] | None = setting(
        values.countries,
        None,
        "The countries to which SMS may be sent, as two-letter codes (ISO 3166), comma-separated, such as DE,AT; or "
        "all. Unset: the countries of the default senders that are numbers. Use the same value on all hosts, and for "
        "applications that use the library.",
    )
    workers: int = setting(
        values.worker_count, "auto", "The number of worker processes on this host; auto: one per core."
    )
    prefetch: int = setting(
        values.whole(1, 5000),
        "256",
        "The most emails that a worker sends at the same time. The worker prefetches 25 % more messages, to hide the "
        "round trip to RabbitMQ.",
    )
    bundle_emails: int = setting(
        values.whole(1, MAX_BUNDLE_EMAILS),
        "16",
        "The most emails that one message on the send queue points to (a bundle); 1: one message per email. An email "
        "has its own message unless many are due and workers are fast. RabbitMQ counts messages, not emails.",
    )
    bulk_call_emails: int = setting(
        values.whole(1, 1000),
        "1",
        "The most emails of the same sender and template in one bulk call to SendGrid (up to 1000) or SES (up to 50); "
        "1: one call per email. Larger calls are faster, but if a call's answer is lost, all its emails become held.",
    )
    allowed_provider_headers: tuple[str, ...] = setting(
        values.header_names,
        None,
        "Headers that control a provider, such as X-MC-Tags, and that emails may nevertheless set: whole names, "
        "comma-separated. Use the same value on all hosts.",
        empty=(),
    )
    worker_memory_mb: int = setting(
        values.whole(16, 65536),
        "256",
        "Megabytes that a worker may use to load and render large bodies and attachments. Emails that do not fit wait. "
        "An email that needs more than the limit waits until no other email uses this memory.",
    )
    lease_seconds: float = setting(
        values.seconds(1, 3600), "60", "How long a worker owns an email before the worker has to renew the lease."
    )
    allow_recipients: tuple[str, ...] | None = setting(
        values.recipients,
        None,
        "For a system that must not reach real people: the only recipients of emails and SMS, as addresses, domains, "
        "and phone numbers or their beginnings such as +4915, comma-separated; or none. Emails to all others are kept "
        "back: they fail with the error kept_back. Unset: all recipients. Use the same value on all hosts.",
        may_be_empty=False,
    )
    redirect_to: str | None = setting(
        values.mailbox,
        None,
        "An address that gets the emails which DISPATCHER_ALLOW_RECIPIENTS would keep back, instead of all their "
        "recipients. If only this setting is set, it gets all emails. SMS are still kept back. Use the same value on "
        "all hosts.",
        may_be_empty=False,
    )
    sender_domains: tuple[str, ...] = setting(
        values.domains,
        None,
        "The domains in the From of your emails, comma-separated, such as example.com. `dispatcher doctor` checks "
        "their SPF, DKIM and DMARC records, and those of the domains that API keys allow.",
        empty=(),
    )
    dkim_selectors: tuple[str, ...] = setting(
        values.names("A-Za-z0-9._-"),
        None,
        "The selectors of the DKIM keys, comma-separated, for `dispatcher doctor`. Unset: the usual selectors of "
        "SendGrid and Resend.",
        empty=(),
    )
    return_path_domains: tuple[str, ...] = setting(
        values.domains,
        None,
        "The domains of the return path that SendGrid, SES or Resend uses for your emails (custom MAIL FROM), "
        "comma-separated, for `dispatcher doctor`. Unset: send.DOMAIN for Resend, unknown for the others.",
        empty=(),
    )
    send_timeout_seconds: float = setting(
        values.seconds(0.1, 600), "30", "Time limit for one attempt, including the time to connect."
    )
    max_attempts: int = setting(
        values.whole(1, 100),
        "8",
        "The most attempts for one email. If the last attempt is deferred, the email fails, unless it waits for a "
        "redelivery (DISPATCHER_REDELIVER_FOR). With the defaults of this and the next two settings, a deferred email "
        "is tried for 5 to 10 minutes.",
    )
    retry_base_seconds: float = setting(
        values.seconds(0.01, 600),
        "6",
        "Longest wait before the first retry; the limit doubles with each retry. No wait is below half of its limit.",
    )
    retry_cap_seconds: float = setting(values.seconds(0.01, 3600), "240", "Longest wait between two attempts.")
    redeliver_for: float = setting(
        values.off_or_duration(60, 1_209_600),
        "off",
        "How long a deferred email is tried again after its attempts are used up, such as 4h or 86400 (seconds). The "
        "time begins when the email is due, and the tries are minutes to hours apart. off: the email fails. Use the "
        "same value on all hosts.",
    )
    on_uncertain: OnUncertain = setting(
        lambda text: OnUncertain(values.choice(*OnUncertain)(text)),
        "hold",
        "What to do with an email if it is unknown whether the provider accepted it: `hold` it for an operator, or "
        "`resend` it, which may send a duplicate. Use the same value on all hosts of a database: if a host vanishes, "
        "another host's value applies.",
    )
    drain_seconds: float = setting(
        values.seconds(0, 3600), "45", "How long a stopping worker waits for the answers of providers."
    )
    hang_seconds: float = setting(
        values.off_or_seconds(5, 3600),
        "20",
        "A process whose event loop is blocked for this long is aborted and replaced; 0: never.",
    )
    recycle_emails: int = setting(
        values.whole(0, 1_000_000_000),
        "0",
        "The parent replaces a worker after about this many emails; 0: never.",
    )
    host_name: str = setting(
        values.host_name,
        "auto",
        "This host's name in the database, logs and alerts; unique among hosts; auto: the machine's name.",
    )
    run_dir: Path = setting(
        values.run_folder,
        "auto",
        "Folder for this host's in-flight ledgers; auto: /var/lib/email-dispatcher for root, else email-dispatcher "
        "in $XDG_STATE_HOME or ~/.local/state.",
    )
    http_connections: int = setting(
        values.whole(1, 5000), "256", "The most HTTP connections that a worker opens to a provider."
    )
    ca_file: Path | None = setting(
        values.certificates,
        None,
        "PEM file of certificates to trust, instead of the system's certificates. For HTTP, the system's certificates "
        "are trusted, too.",
    )
    metrics: bool = setting(values.switch, "on", "Whether the processes write metrics.")
    metrics_dir: Path | None = setting(
        values.path_of,
        None,
        "Folder for the metric files; unset: the folder `metrics` in the run directory.",
        variable="PROMETHEUS_MULTIPROC_DIR",
    )
    metrics_address: values.Listener = setting(
        values.listener,
        "127.0.0.1:9464",
        "Where the monitor serves /metrics, /healthz and /readyz, without authentication; or off.",
    )
    ready_pending_seconds: float = setting(
        values.seconds(1, 604_800), "300", "/readyz fails if the oldest pending email is older than this."
    )
    dlq_probe_seconds: float = setting(
        values.seconds(0.1, 3600), "60", "How often the monitor reads the depth of the DLQ."
    )
    alert_webhook_url: str = setting(
        values.webhook_url,
        None,
        "URL to which alerts are posted, signed as Standard Webhooks specifies; https only.",
        secret=True,
        is_secret_path=True,
        empty="",
    )
    alert_webhook_secret: str = setting(
        values.webhook_secret,
        None,
        "Key that signs the alerts to DISPATCHER_ALERT_WEBHOOK_URL: whsec_ and base64. The receiver needs this key, "
        "too.",
        secret=True,
        empty="",
    )
    alert_webhook_allow_private: bool = setting(
        values.switch, "off", "Whether the host in DISPATCHER_ALERT_WEBHOOK_URL may have a private address."
    )
    alert_smtp_url: values.SmtpServer | None = setting(
        values.smtp_url, None, "SMTP server for alerts only, in the format of DISPATCHER_SMTP_URL.", secret=True
    )
    alert_email_from: str = setting(values.mailbox, None, "Sender of alerts by email.", empty="")
    alert_email_to: tuple[str, ...] = setting(
        values.mailboxes, None, "Recipients of alerts by email, comma-separated.", empty=()
    )
    alert_after_seconds: float = setting(
        values.seconds(1, 86_400),
        "300",
        "An alert is raised if for this long no due email is sent, a provider cannot be used, or a host does not "
        "report.",
    )
    alert_reminder_seconds: float = setting(
        values.seconds(1, 604_800), "3600", "How often an alert is repeated until it is resolved."
    )
    api_address: values.Listener = setting(values.api_listener, "127.0.0.1:8025", "Where `dispatcher api` listens.")
    api_allow_anonymous: bool = setting(
        values.switch,
        "off",
        "Whether `dispatcher api` accepts requests without a key on the loopback interface, until the first key is "
        "created: for development, never behind a proxy.",
    )
    api_metrics_address: values.Listener = setting(
        values.listener,
        "off",
        "Address at which `dispatcher api` serves /metrics. Needed only on hosts without `dispatcher run`: the monitor "
        "of `dispatcher run` serves the API's metrics, too.",
    )
    api_insert_batch_emails: int = setting(
        values.whole(1, 500), "256", "The most emails that one statement inserts; 1: one statement per request."
    )
    api_max_concurrent_requests: int = setting(
        values.whole(1, 100_000),
        "1000",
        "The most requests that a process serves at the same time. The requests of one key may use half of them; "
        "further requests get 503.",
    )
    api_head_seconds: float = setting(
        values.seconds(0.1, 600),
        "10",
        "How long a client may take to send a request's headers. A body may be late by this time, and must arrive at "
        "1 KiB per second or faster.",
    )
    api_request_seconds: float = setting(
        values.seconds(0.1, 3600), "30", "How long a client may take to send a whole request."
    )
    api_max_body_bytes: int = setting(values.whole(1024, 2**30), str(40 * _MIB), "The largest request body, in bytes.")
    api_memory_bytes: int = setting(
        values.whole(1024, 2**33),
        str(128 * _MIB),
        "Bytes of memory that a process may use for all request bodies and for parsing them. The requests of one key "
        "may use half of them; further requests get 503.",
    )
    api_max_recipients: int = setting(
        values.whole(1, 1000), "50", "The most recipients of an email from the API or over SMTP."
    )
    api_max_attachments: int = setting(
        values.whole(0, 100), "20", "The most attachments of an email from the API or over SMTP."
    )
    api_max_attachment_bytes: int = setting(
        values.whole(0, 25 * _MIB),
        str(25 * _MIB),
        "The largest total size of the attachments of an email from the API or over SMTP, decoded, in bytes.",
    )
    api_denied_extensions: tuple[str, ...] = setting(
        values.names("A-Za-z0-9_.-"),
        _PROGRAM_EXTENSIONS,
        "File extensions of attachments that the API and `dispatcher smtp` refuse, comma-separated.",
        empty=(),
    )
    api_allowed_headers: tuple[str, ...] = setting(
        values.names("A-Za-z0-9*-"),
        _ALLOWED_HEADERS,
        "Headers that an email from the API may set, comma-separated. X-* allows all headers that begin with X-. "
        "`dispatcher smtp` leaves out all other headers.",
        empty=(),
    )
    submission_address: values.Listener = setting(
        values.api_listener, "127.0.0.1:2525", "Where `dispatcher smtp` accepts emails over SMTP; see docs/smtp.md."
    )
    submission_tls: str = setting(
        values.choice("off", "starttls", "implicit"),
        "off",
        "How clients of `dispatcher smtp` encrypt: starttls (usual on port 587), implicit (from the first byte, port "
        "465), or off, which is allowed only on the loopback interface.",
    )
    submission_certificate: Path | None = setting(
        values.certificates, None, "PEM file with the certificate of `dispatcher smtp`, and its chain."
    )
    submission_certificate_key: Path | None = setting(
        values.path_of,
        None,
        "PEM file with the private key of DISPATCHER_SUBMISSION_CERTIFICATE; unset: the same file.",
    )
    submission_host_name: str = setting(
        values.host_name, None, "The name with which `dispatcher smtp` greets; unset: the machine's name.", empty=""
    )
    submission_connections: int = setting(
        values.whole(2, 100_000),
        "1000",
        "The most connections to a process of `dispatcher smtp`. One API key may use half of them.",
    )
    submission_connections_per_address: int = setting(
        values.whole(1, 100_000),
        "100",
        "The most connections of one IPv4 address, or of one IPv6 network /64, to a process of `dispatcher smtp`.",
    )
    submission_max_bytes: int = setting(
        values.whole(1024, 2**26), str(40 * _MIB), "The largest message that `dispatcher smtp` accepts, in bytes."
    )
    submission_idle_seconds: float = setting(
        values.seconds(0.1, 3600), "300", "How long a client of `dispatcher smtp` may wait between two commands."
    )
    submission_data_seconds: float = setting(
        values.seconds(0.1, 3600), "300", "How long a client of `dispatcher smtp` may take to transmit one message."
    )
    ops: bool = setting(
        values.switch, "off", "Whether `dispatcher api` serves the operators' page at /ops; see docs/ops-page.md."
    )
    ops_url: str | None = setting(
        values.url("https", "http"),
        None,
        "URL at which browsers reach the operators' page through a proxy, such as https://ops.example.com/mail/ops; "
        "unset: /ops at the API's address.",
    )
    ops_subject: str = setting(
        values.choice("masked", "shown", "off"),
        "masked",
        "How lists of the operators' page show subjects: only the first letter of each word; to every visitor, without "
        "an entry in the audit log; or not at all.",
    )
    ops_idle_seconds: float = setting(
        values.seconds(60, 30 * 86_400), "3600", "An unused sign-in to the operators' page ends after this time."
    )
    ops_session_seconds: float = setting(
        values.seconds(60, 30 * 86_400), "43200", "Every sign-in to the operators' page ends after this time."
    )
    ops_oidc_issuer: str | None = setting(
        values.issuer,
        None,
        "The OpenID Connect issuer with which people sign in to the operators' page, such as "
        "https://id.example.com/realms/ops; unset: they sign in with API keys only. See docs/ops-page.md.",
    )
    ops_oidc_client_id: str = setting(
        str, None, "The client id of the operators' page at the OpenID Connect issuer.", empty=""
    )
    ops_oidc_client_secret: str = setting(
        str, None, "The client secret of the operators' page at the OpenID Connect issuer.", secret=True, empty=""
    )
    ops_oidc_claim: str = setting(
        str,
        "groups",
        "The claim of the ID token that decides what a visitor of the operators' page may do: a text or a list of "
        "texts. A name with dots, such as realm_access.roles, is a path.",
    )
    ops_oidc_operate: tuple[str, ...] = setting(
        values.texts,
        None,
        "Values of DISPATCHER_OPS_OIDC_CLAIM that allow a visitor everything, comma-separated.",
        empty=(),
    )
    ops_oidc_read: tuple[str, ...] = setting(
        values.texts,
        None,
        "Values of DISPATCHER_OPS_OIDC_CLAIM that allow a visitor to read, comma-separated.",
        empty=(),
    )
    ops_oidc_tenant_claim: str | None = setting(
        str,
        None,
        "The claim of the ID token that names the only tenant whose emails a visitor sees; its value may be * for all "
        "tenants. Unset: all visitors see all tenants.",
    )
    bounce_maildir: Path | None = setting(
        values.path_of,
        None,
        "Maildir with the bounces of emails sent over SMTP, read by the monitor of this host; see "
        "docs/events-setup-smtp.md.",
    )
    bounce_keep: bool = setting(
        values.switch,
        "off",
        "Whether bounces stay in the Maildir, in its folder `cur`, after they are stored; off: they are deleted.",
    )
    webhooks_allow_private: bool = setting(
        values.switch,
        "off",
        "Whether the host in a webhook's URL may have a private address. If on, http:// is allowed, too, for loopback "
        "addresses. Use the same value on all hosts.",
    )
    sendgrid_events_keys: tuple[str, ...] = setting(
        event_values.public_keys,
        None,
        "SendGrid's verification keys for its signed event webhook, in base64, comma-separated; two during a rotation. "
        "Unset: the API does not accept SendGrid's events.",
        secret=True,
        empty=(),
    )
    ses_events_topics: tuple[str, ...] = setting(
        event_values.topics,
        None,
        "ARNs of the SNS topics from which the API accepts Amazon SES's events, comma-separated. Unset: the API does "
        "not accept events of Amazon SES.",
        empty=(),
    )
    ses_events_queue_url: str = setting(
        event_values.queue_url,
        None,
        "URL of an SQS queue with Amazon SES's events, from SNS or EventBridge. The monitor polls the queue.",
        empty="",
    )
    resend_events_secrets: tuple[str, ...] = setting(
        event_values.webhook_secrets,
        None,
        "The signing secrets of Resend's webhooks (whsec_ and base64), comma-separated; two during a rotation. Unset: "
        "the API does not accept Resend's events.",
        secret=True,
        empty=(),
    )
    events_max_age_seconds: float = setting(
        values.off_or_seconds(60, 31_536_000),
        "90000",
        "How old a signed request with events may be. SendGrid retries for a day, SNS for an hour; a request of Resend "
        "may be 5 minutes old at most, because each retry is signed anew. 0: any age.",
    )
    retain_content_days: int = setting(
        values.whole(0, 36500),
        "30",
        "Days to keep the content of a finished email (up to a week longer); 0: for ever.",
    )
    retain_emails_days: int = setting(
        values.whole(0, 36500), "400", "Days to keep a finished email (up to a week longer); 0: for ever."
    )
    retain_undecided_days: int = setting(
        values.whole(0, 36500),
        "180",
        "Days to keep the content of a failed or held email that no operator has replayed, confirmed, released or "
        "discarded; an alert warns a week before the deletion; 0: for ever.",
    )
    retain_keys_days: int = setting(
        values.whole(0, 36500), "0", "Days after which the message key of a deleted email may be used again; 0: never."
    )
    retain_audit_days: int = setting(
        values.whole(0, 36500),
        "0",
        "Days to keep the record of operators' actions and their reasons; 0: for ever.",
    )
    retain_events_days: int = setting(
        values.whole(1, 366),
        "7",
        "Days to keep the events that webhooks deliver and applications poll; a webhook that is down for longer misses "
        "events.",
    )
    suppress_on: tuple[str, ...] = setting(
        values.choices(*AUTOMATIC),
        ",".join(AUTOMATIC),
        "Which events of providers suppress a recipient; empty: none. hard_bounce: the address does not exist; "
        "complaint: the recipient reported spam.",
        empty=(),
    )
    suppress_days: int = setting(
        values.whole(0, 36500), "0", "Days that a recipient stays suppressed after an event; 0: for ever."
    )
    suppress_soft_bounces: int = setting(
        values.whole(0, 1000),
        "0",
        "Suppress an address after soft bounces (a full mailbox, for example) of this many emails; 0: never.",
    )
    suppress_soft_bounce_days: int = setting(
        values.whole(1, 365), "7", "Count the soft bounces of this many days for DISPATCHER_SUPPRESS_SOFT_BOUNCES."
    )
    unsubscribe_url: str | None = setting(
        values.url("https", "http"),
        None,
        "The base URL at which recipients reach the HTTP API, for the List-Unsubscribe header (RFC 8058); unset: no "
        "such header.",
    )
    unsubscribe_senders: tuple[str, ...] = setting(
        values.names("A-Za-z0-9@._+-"),
        None,
        "Domains and addresses of senders, comma-separated. Their emails get the List-Unsubscribe header if they have "
        "exactly one recipient.",
        empty=(),
    )
    log_level: str = setting(values.choice(*LOG_LEVELS), "info", "Lowest level to log: debug, info, warning or error.")
    log_format: str = setting(
        values.choice(*LOG_FORMATS), "auto", "json, text, or auto: text on a terminal, otherwise JSON."
    )

    own: Mapping[str, ProviderSettings] = field(default_factory=dict)
    """The settings of each known provider and account, by its name."""
    account_events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """With what the events of accounts are verified, by the account."""

    if not TYPE_CHECKING:
        # To compile the methods that `dataclass` generates for so many fields takes 4 ms of each command.
        def __init__(self, **given: Any) -> None:
            for each in fields(self):
                if each.name not in given:
                    given[each.name] = each.default_factory() if each.default is MISSING else each.default
                object.__setattr__(self, each.name, given.pop(each.name))
            if given:
                raise TypeError(f"Settings has no field {next(iter(given))!r}.")

        def __setattr__(self, name: str, _value: object) -> NoReturn:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")

    @property
    def sms_rules(self) -> SmsRules:
        from dispatcher.domain.sms import SmsRules  # loaded late, because few commands need it

        return SmsRules(self.sms_max_segments, self.sms_countries)

    @property
    def recipients_digest(self) -> str:
        """The same on hosts that allow the same recipients; empty if this host allows all."""
        if self.allow_recipients is None and self.redirect_to is None:
            return ""
        allowed = None if self.allow_recipients is None else sorted(self.allow_recipients)
        return sha256(repr((allowed, self.redirect_to)).encode()).hexdigest()[:16]

    @property
    def metrics_folder(self) -> Path:
        return self.metrics_dir or self.run_dir / "metrics"

    def ceiling_of(self, provider: str) -> float | None:
        """The most emails per second of a provider; None for no limit."""
        return self.own[provider].max_per_second

    def verifies_events(self, provider: str) -> dict[str, tuple[str, ...]]:
        """With what the events of a provider and its accounts are verified, by the name. What the provider itself has
        comes first, and verifies the events of all its accounts."""
        all_of_them = getattr(self, EVENTS_FIELDS[provider])
        found = {name: each for name, each in self.account_events.items() if provider_of(name) == provider}
        return {provider: all_of_them, **found} if all_of_them else found

    def queue_of(self, lane: str) -> str:
        return send_queue(self.queue, lane)

    def of(self, kind: type[P]) -> P:
        """A provider's own settings, selected by their class; the defaults if no provider has such settings."""
        return next((found for found in self.own.values() if type(found) is kind), None) or kind()
