"""Every setting that is no provider's own, a field each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from dispatcher.config import values
from dispatcher.config.setting import setting
from dispatcher.domain.status import OnUncertain

BUILT_IN: Final = values.built_in_providers()
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("auto", "json", "text")
QUEUE_TYPES: Final = ("quorum", "classic")
MOST_BUNDLED: Final = 50
"""Emails that one message points to: with the longest keys it stays below `broker.pointer.MAX_BODY_OCTETS`."""

P = TypeVar("P", bound="ProviderSettings")

_ALLOWED_HEADERS: Final = (
    "X-*,List-*,In-Reply-To,References,Auto-Submitted,Precedence,Importance,Priority,Feedback-ID,Organization,Comments,"
    "Keywords"
)
_PROGRAM_ENDINGS: Final = (
    "ade,adp,apk,app,application,appref-ms,appx,appxbundle,asp,aspx,asx,bas,bat,bgi,cab,cdxml,cer,chm,cmd,cnt,com,"
    "cpl,crt,csh,der,diagcab,diagcfg,diagpkg,dll,dmg,ex,ex_,exe,fxp,gadget,grp,hlp,hpj,hta,htc,img,inf,ins,iso,isp,"
    "its,jar,jnlp,js,jse,ksh,lib,library-ms,lnk,mad,maf,mag,mam,maq,mar,mas,mat,mau,mav,maw,mcf,mda,mdb,mde,mdt,mdw,"
    "mdz,mht,mhtml,mjs,msc,msh,msh1,msh1xml,msh2,msh2xml,mshxml,msi,msix,msixbundle,msp,mst,msu,nsh,one,onepkg,"
    "onetoc2,ops,osd,pcd,pif,pl,plg,prf,prg,printerexport,ps1,ps1xml,ps2,ps2xml,psc1,psc2,psd1,psdm1,pssc,pst,py,pyc,"
    "pyo,pyw,pyz,pyzw,reg,scf,scr,sct,search-ms,settingcontent-ms,shb,shs,sys,theme,tmp,udl,url,vb,vbe,vbp,vbs,vhd,"
    "vhdx,vps,vsmacros,vss,vst,vsw,vxd,webpnp,website,ws,wsb,wsc,wsf,wsh,xbap,xll,xnk"
)
"""Endings that Gmail, Outlook and Amazon SES refuse, and those of OneNote, whose files can carry programs."""
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """The settings of one provider, which its class inherits and adds to: `DISPATCHER_<NAME>_<FIELD>`."""

    max_per_second: float | None = setting(
        values.rate, None, "Emails per second over all workers and hosts; unset: no ceiling. Halved while throttled."
    )

    def most_connections(self, settings: Settings, /) -> int:
        """How many connections, or files, one worker may have open to the provider; never above DISPATCHER_PREFETCH."""
        return settings.prefetch


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that an operator can set; one field, one setting."""

    database_url: str = setting(
        values.database_url,
        None,
        "PostgreSQL, as a libpq URL or keywords; several hosts: postgresql://…@a,b/db?target_session_attrs=read-write.",
        secret=True,
        empty="",
    )
    database_schema: str = setting(
        values.schema_name,
        "dispatcher",
        "The schema of the dispatcher's tables; `init` makes it. Set the same for applications that use the library.",
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
        "RabbitMQ's management API, with its user; for a cluster, the URLs of its nodes, comma-separated.",
        secret=True,
        empty="",
    )
    exchange: str = setting(values.queue_name, "email.dispatcher", "The exchange that we publish to.")
    queue: str = setting(values.queue_name, "email.dispatcher.send", "The queue of emails to send.")
    dlq: str = setting(values.queue_name, "email.dispatcher.dlq", "The queue of dead letters.")
    queue_type: str = setting(values.choice(*QUEUE_TYPES), "quorum", "What `init` declares the queues as.")
    providers: tuple[str, ...] = setting(
        values.provider_names,
        None,
        f"Who sends: {' or '.join(BUILT_IN)}, or one that an installed package brings. No default.",
        empty=(),
    )
    workers: int = setting(values.worker_count, "auto", "Worker processes on this host; auto is one per core.")
    prefetch: int = setting(
        values.whole(1, 5000), "256", "Emails that a worker sends at once; a quarter more messages wait at hand."
    )
    bundle_emails: int = setting(
        values.whole(1, MOST_BUNDLED),
        "1",
        "Most emails that a message on the send queue points to; 1: a message each. More cost RabbitMQ and workers "
        "less, and RabbitMQ's counts are no emails then.",
    )
    bulk_call_emails: int = setting(
        values.whole(1, 1000),
        "1",
        "Most emails of one sender and template in a call to SendGrid (up to 1000) or SES (up to 50); 1: a call each. "
        "More are faster; where a call's answer is lost, all of its emails are held.",
    )
    allowed_provider_headers: tuple[str, ...] = setting(
        values.header_names,
        None,
        "Headers that command a provider, such as X-MC-Tags, and that emails may set nevertheless. Whole names, "
        "comma-separated. Set the same on all hosts.",
        empty=(),
    )
    worker_memory_mb: int = setting(
        values.whole(16, 65536),
        "256",
        "Megabytes that a worker may use for large bodies and for attachments, with what rendering makes of them. "
        "An email that needs more than all of it is sent alone; those that do not fit wait.",
    )
    lease_seconds: float = setting(
        values.seconds(1, 3600), "60", "How long a worker owns an email; slow sends renew it."
    )
    send_timeout_seconds: float = setting(
        values.seconds(0.1, 600), "30", "One attempt's total deadline, connecting too."
    )
    max_attempts: int = setting(values.whole(1, 100), "5", "Attempts before a deferred email is failed.")
    retry_base_seconds: float = setting(
        values.seconds(0.01, 600), "1", "The first retry's longest wait; doubles each time."
    )
    retry_cap_seconds: float = setting(values.seconds(0.01, 3600), "60", "The longest wait between two attempts.")
    on_uncertain: OnUncertain = setting(
        lambda text: OnUncertain(values.choice(*OnUncertain)(text)),
        "hold",
        "Where nobody can know whether the provider accepted: hold the email, or resend it (may duplicate). The same "
        "on all hosts of a database: another host judges what one that vanished had leased.",
    )
    drain_seconds: float = setting(
        values.seconds(0, 3600), "45", "How long a stopping worker may wait for the provider."
    )
    hang_seconds: float = setting(
        values.off_or_seconds(5, 3600),
        "20",
        "A process whose loop stands still for so long is aborted and replaced; 0: never.",
    )
    recycle_emails: int = setting(
        values.whole(0, 1_000_000_000), "0", "After about so many emails a worker is replaced by a fresh one; 0: never."
    )
    host_name: str = setting(
        values.host_name,
        "auto",
        "This host's name in rows, logs and alerts, unlike every other host's; auto: the machine's.",
    )
    run_dir: Path = setting(
        values.run_folder,
        "auto",
        "Where a host's `run` keeps its in-flight ledgers; auto: /var/lib/email-dispatcher for root, else "
        "email-dispatcher in $XDG_STATE_HOME or ~/.local/state.",
    )
    http_connections: int = setting(values.whole(1, 5000), "256", "Requests that a worker keeps on the wire over HTTP.")
    ca_file: Path | None = setting(
        values.certificates, None, "Certificates to trust, as PEM: instead of the system's; over HTTP besides them."
    )
    metrics: bool = setting(values.switch, "on", "Whether processes count what they do.")
    metrics_dir: Path | None = setting(
        values.path_of,
        None,
        "Where they count; unset: metrics in the run directory.",
        variable="PROMETHEUS_MULTIPROC_DIR",
    )
    metrics_address: values.Listener = setting(
        values.listener,
        "127.0.0.1:9464",
        "Where the monitor serves /metrics, /healthz and /readyz, to anybody who can reach it; or off.",
    )
    ready_pending_seconds: float = setting(
        values.seconds(1, 604_800), "300", "Age of the oldest pending email from which /readyz says no."
    )
    dlq_probe_seconds: float = setting(
        values.seconds(0.1, 3600), "60", "How often the monitor looks at the depth of the DLQ."
    )
    alert_webhook_url: str = setting(
        values.webhook_url,
        None,
        "Where alerts are posted, signed as Standard Webhooks specifies. https only.",
        secret=True,
        is_secret_path=True,
        empty="",
    )
    alert_webhook_secret: str = setting(
        values.webhook_secret,
        None,
        "What signs them: whsec_ and base64; the receiver knows it, too.",
        secret=True,
        empty="",
    )
    alert_webhook_allow_private: bool = setting(
        values.switch, "off", "Whether the webhook's host may have an address that is not public."
    )
    alert_smtp_url: values.SmtpServer | None = setting(
        values.smtp_url, None, "SMTP server for alerts alone, with the forms of DISPATCHER_SMTP_URL.", secret=True
    )
    alert_email_from: str = setting(values.mailbox, None, "Whom alerts by email come from.", empty="")
    alert_email_to: tuple[str, ...] = setting(
        values.mailboxes, None, "Whom alerts by email go to, comma-separated.", empty=()
    )
    alert_after_seconds: float = setting(
        values.seconds(1, 86_400),
        "300",
        "Alerts when, for so long, emails are due and none is sent, a provider cannot be used, or a host is silent.",
    )
    alert_reminder_seconds: float = setting(
        values.seconds(1, 604_800), "3600", "How often an alert is told again while it stands."
    )
    api_address: values.Listener = setting(values.api_listener, "127.0.0.1:8025", "Where `dispatcher api` listens.")
    api_allow_anonymous: bool = setting(
        values.switch,
        "off",
        "Whether `dispatcher api` answers without a key, while there has never been one, whoever reaches it on the "
        "loopback: for development, and never behind a proxy.",
    )
    api_metrics_address: values.Listener = setting(
        values.listener,
        "off",
        "Where `dispatcher api` serves /metrics: for hosts without `dispatcher run`, whose monitor has them, too.",
    )
    api_insert_batch_emails: int = setting(
        values.whole(1, 500), "256", "Emails that one statement inserts; 1 gathers nothing."
    )
    api_max_requests: int = setting(
        values.whole(1, 100_000),
        "1000",
        "Requests that a process works on at once. One key gets half of them; more get 503.",
    )
    api_head_seconds: float = setting(
        values.seconds(0.1, 600),
        "10",
        "How long a client may take for a request's head. A body must bring 1 KiB a second, checked at that interval.",
    )
    api_request_seconds: float = setting(values.seconds(0.1, 3600), "30", "How long it may take for the whole request.")
    api_max_body_bytes: int = setting(values.whole(1024, 2**30), str(40 * _MIB), "The largest body that is read.")
    api_memory_bytes: int = setting(
        values.whole(1024, 2**33),
        str(128 * _MIB),
        "Memory of a process for all bodies and what parsing makes of them. One key gets half of it; more get 503.",
    )
    api_max_recipients: int = setting(values.whole(1, 1000), "50", "Recipients of an email that the API takes.")
    api_max_attachments: int = setting(values.whole(0, 100), "20", "Attachments of an email that the API takes.")
    api_max_attachment_bytes: int = setting(
        values.whole(0, 25 * _MIB), str(25 * _MIB), "An email's attachments together, decoded, that the API takes."
    )
    api_denied_extensions: tuple[str, ...] = setting(
        values.names("A-Za-z0-9_.-"), _PROGRAM_ENDINGS, "Endings of filenames that the API does not take.", empty=()
    )
    api_allowed_headers: tuple[str, ...] = setting(
        values.names("A-Za-z0-9*-"), _ALLOWED_HEADERS, "Headers that an email may set through the API.", empty=()
    )
    retain_content_days: int = setting(
        values.whole(0, 36500),
        "30",
        "Days that a finished email's content is kept, and up to a week more; 0: for ever.",
    )
    retain_emails_days: int = setting(
        values.whole(0, 36500), "400", "Days that a finished email is kept at all, and up to a week more; 0: for ever."
    )
    retain_undecided_days: int = setting(
        values.whole(0, 36500),
        "180",
        "Days that a failed or held email keeps its content while no operator has replayed, confirmed, released or "
        "discarded it; an alert warns a week before; 0: for ever.",
    )
    retain_keys_days: int = setting(
        values.whole(0, 36500), "0", "Days after which the key of an email that is gone may be used again; 0: never."
    )
    retain_audit_days: int = setting(
        values.whole(0, 36500),
        "0",
        "Days that the record of operators' acts, with their reasons, is kept; 0: for ever.",
    )
    log_level: str = setting(values.choice(*LOG_LEVELS), "info", "debug, info, warning or error.")
    log_format: str = setting(values.choice(*LOG_FORMATS), "auto", "auto is text on a terminal, JSON elsewhere.")

    own: Mapping[str, ProviderSettings] = field(default_factory=dict)
    """Each known provider's own settings, by its name."""

    @property
    def metrics_folder(self) -> Path:
        """Where this host's processes count."""
        return self.metrics_dir or self.run_dir / "metrics"

    def ceiling_of(self, provider: str) -> float | None:
        """A provider's ceiling in emails per second; None where there is none."""
        return self.own[provider].max_per_second

    def of(self, kind: type[P]) -> P:
        """What one provider's own settings are, by their class; its defaults if none were read."""
        return next((found for found in self.own.values() if type(found) is kind), None) or kind()
