"""Settings from the environment: read once at the edge, validated together, handed down as frozen values.

Every setting is one field of `Settings`: its variable (`DISPATCHER_` and the field's name in capitals, unless it says
otherwise), default, parser (out of `setting_values`) and help stand in that one place, and `dispatcher config` prints
them from there. A setting that holds a secret may also be given as a file, by its variable with `_FILE` appended.
Nothing here runs at import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import dispatcher.setting_values as values
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import ConfigurationError

PREFIX: Final = "DISPATCHER_"
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("auto", "json", "text")
QUEUE_TYPES: Final = ("quorum", "classic")
LONG_WAIT_SECONDS: Final = 600.0
"""A retry may wait for so long without a warning."""
MOST_BUNDLED: Final = 50
"""Emails that one message points to: with the longest keys it stays below `broker.pointer.MAX_BODY_OCTETS`."""

T = TypeVar("T")


def setting(
    parse: Callable[[str], T],
    default: str | None,
    about: str,
    *,
    variable: str | None = None,
    secret: bool = False,
    is_secret_path: bool = False,
    empty: T | None = None,
) -> T:
    """A field of `Settings`.

    Args:
        parse: From the variable's text to the value; raises ValueError with the sentence for the operator.
        default: The text that stands for an unset variable; None if the setting has none and `empty` is its value then.
        about: One sentence for `dispatcher config` and the documentation.
        variable: The variable's name where it is not the prefix and the field's name.
        secret: Never shown; may come from a file.
        is_secret_path: The value is a URL whose path is secret.
        empty: The value of an unset setting without default.
    """
    metadata = {
        "parse": parse,
        "default": default,
        "about": about,
        "variable": variable,
        "secret": secret,
        "is_secret_path": is_secret_path,
    }
    return field(default=empty, repr=not secret, metadata=metadata)  # type: ignore[return-value]


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

_CEILING: Final = "Emails per second over all workers and hosts; unset: no ceiling. Halved while throttled."


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
        values.providers, None, f"Who sends: {' or '.join(values.KNOWN_PROVIDERS)}. No default.", empty=()
    )
    workers: int = setting(values.worker_count, "auto", "Worker processes on this host; auto is one per core.")
    prefetch: int = setting(
        values.whole(1, 5000), "256", "Emails that a worker sends at once; a quarter more messages wait at hand."
    )
    bundle: int = setting(
        values.whole(1, MOST_BUNDLED),
        "1",
        "Most emails that a message on the send queue points to; 1: a message each. More cost RabbitMQ and workers "
        "less, and RabbitMQ's counts are no emails then.",
    )
    coalesce: int = setting(
        values.whole(1, 1000),
        "1",
        "Most emails of one sender and template in a call to SendGrid (up to 1000) or SES (up to 50); 1: a call each. "
        "More are faster; where a call's answer is lost, all of its emails are held.",
    )
    allowed_headers: tuple[str, ...] = setting(
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
    smtp_url: values.SmtpServer | None = setting(
        values.smtp_url,
        None,
        "SMTP server: smtp:// requires STARTTLS, smtps:// is TLS, smtp://…?tls=none is plain.",
        secret=True,
    )
    smtp_connections: int = setting(values.whole(1, 1000), "8", "Connections that a worker keeps to the SMTP server.")
    smtp_emails_per_connection: int = setting(
        values.whole(1, 1_000_000), "100", "Emails before a connection is renewed."
    )
    smtp_max_per_second: float | None = setting(values.rate, None, _CEILING)
    capture_max_per_second: float | None = setting(values.rate, None, _CEILING)
    sendgrid_api_key: str = setting(
        values.api_key,
        None,
        "SendGrid's API key, with the scope mail.send.",
        variable="SENDGRID_API_KEY",
        secret=True,
        empty="",
    )
    sendgrid_host: str = setting(
        values.https_host,
        "https://api.sendgrid.com",
        "SendGrid's region: https://api.sendgrid.com, or https://api.eu.sendgrid.com for subusers in the EU.",
    )
    sendgrid_sandbox: bool = setting(
        values.switch, "off", "SendGrid's sandbox mode: it validates emails, and delivers none."
    )
    sendgrid_max_per_second: float | None = setting(values.rate, None, _CEILING)
    ses_region: str | None = setting(
        values.name("a-z0-9-"),
        None,
        "SES's region, like eu-west-1; else AWS_DEFAULT_REGION's or the AWS profile's.",
        variable="AWS_REGION",
    )
    ses_configuration_set: str | None = setting(
        values.name("A-Za-z0-9_-"), None, "SES's configuration set for every email."
    )
    ses_endpoint_url: str | None = setting(values.endpoint, None, "Instead of SES's own address: https://host.")
    ses_threads: int = setting(
        values.whole(1, 256), "64", "Requests that a worker has on the wire to SES at once; each takes a connection."
    )
    ses_max_per_second: float | None = setting(values.rate, None, _CEILING)
    http_connections: int = setting(values.whole(1, 5000), "256", "Requests that a worker keeps on the wire over HTTP.")
    capture_dir: Path | None = setting(values.path_of, None, "Maildir that the capture provider writes into.")
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
    api_open: bool = setting(
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
    api_gathered_emails: int = setting(
        values.whole(1, 500), "256", "Emails that one statement inserts; 1 gathers nothing."
    )
    api_requests: int = setting(
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
    api_body_bytes: int = setting(values.whole(1024, 2**30), str(40 * _MIB), "The largest body that is read.")
    api_memory_bytes: int = setting(
        values.whole(1024, 2**33),
        str(128 * _MIB),
        "Memory of a process for all bodies and what parsing makes of them. One key gets half of it; more get 503.",
    )
    api_recipients: int = setting(values.whole(1, 1000), "50", "Recipients of an email that the API takes.")
    api_attachments: int = setting(values.whole(0, 100), "20", "Attachments of an email that the API takes.")
    api_attachment_bytes: int = setting(
        values.whole(0, 25 * _MIB), str(25 * _MIB), "An email's attachments together, decoded, that the API takes."
    )
    api_denied_attachments: tuple[str, ...] = setting(
        values.names("A-Za-z0-9_.-"), _PROGRAM_ENDINGS, "Endings of filenames that the API does not take.", empty=()
    )
    api_headers: tuple[str, ...] = setting(
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

    @property
    def metrics_folder(self) -> Path:
        """Where this host's processes count."""
        return self.metrics_dir or self.run_dir / "metrics"

    def ceiling_of(self, provider: str) -> float | None:
        """A provider's ceiling in emails per second; None where there is none."""
        ceiling: float | None = getattr(self, f"{provider}_max_per_second")
        return ceiling


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a setting's value came from, for `dispatcher config`.

    Attributes:
        variable: The environment variable.
        text: What was read; None if it stands at its default.
        source: `environment`, `file` or `default`; for the command line also `env-file`.
    """

    variable: str
    text: str | None
    source: str


def variable_of(setting_field: Field[Any]) -> str:
    """The environment variable of one of `Settings`' fields."""
    return setting_field.metadata["variable"] or PREFIX + setting_field.name.upper()


def load(environ: Mapping[str, str], *, needs: Collection[str] = ()) -> Settings:
    """The settings that an environment gives.

    Args:
        needs: Fields that must be set, because the command cannot work without them.

    Raises:
        ConfigurationError: with every mistake at once, each naming its variable and the remedy.
    """
    settings, _, mistakes = examine(environ, needs=needs)
    if mistakes:
        raise ConfigurationError(mistakes)
    return settings


def examine(
    environ: Mapping[str, str], *, needs: Collection[str] = ()
) -> tuple[Settings, dict[str, Origin], tuple[str, ...]]:
    """The settings, the origin of each by field name, and every mistake; a mistaken setting stands at its default."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    mistakes: list[str] = []
    mistaken: set[str] = set()
    for item in fields(Settings):
        try:
            origin = origins[item.name] = _find(item, environ)
            text = item.metadata["default"] if origin.text is None else origin.text
            if text is not None:
                values[item.name] = item.metadata["parse"](text)
        except ValueError as error:
            origins.setdefault(item.name, Origin(variable_of(item), None, "default"))
            mistakes.append(f"{variable_of(item)} {error}.")
            mistaken.add(item.name)
            if item.metadata["default"] is not None:
                values[item.name] = item.metadata["parse"](item.metadata["default"])
    settings = Settings(**values)
    if not mistakes:
        mistakes.extend(_contradictions(settings, needs, origins))
    else:
        mistakes.extend(_absences(set(needs) - mistaken, origins, settings))
    return settings, origins, tuple(mistakes)


def _find(item: Field[Any], environ: Mapping[str, str]) -> Origin:
    variable = variable_of(item)
    file_variable = f"{variable}_FILE"
    if environ.get(variable) and environ.get(file_variable):
        raise ValueError(f"and {file_variable} are both set; set one of them")
    if environ.get(variable):
        return Origin(variable, environ[variable].strip(), "environment")
    if item.metadata["secret"] and environ.get(file_variable):
        return Origin(variable, _read_secret(file_variable, environ[file_variable]), "file")
    return Origin(variable, None, "default")


def _read_secret(file_variable: str, path: str) -> str:
    try:
        text = values.path_of(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read from the file in {file_variable}: {type(error).__name__}") from None
    if not text:
        raise ValueError(f"is empty in the file that {file_variable} names")
    return text


_REMEDIES: Final = {
    "database_url": "set it to PostgreSQL's URL, like postgresql://user:password@host:5432/dispatcher",
    "amqp_url": "set it to RabbitMQ's URL, like amqp://user:password@host:5672/%2F",
    "providers": f"name who sends: {' or '.join(values.KNOWN_PROVIDERS)}. "
    "No default, so that no email is sent into nothing",
}


def doubts(settings: Settings) -> tuple[str, ...]:
    """What works, and is hardly meant so; a sentence each."""
    found = []
    lease, hang, cap = settings.lease_seconds, settings.hang_seconds, settings.retry_cap_seconds
    if hang >= lease:
        found.append(
            f"DISPATCHER_LEASE_SECONDS ({lease:g}) is not above DISPATCHER_HANG_SECONDS ({hang:g}): a worker that "
            "hangs loses its leases before it is replaced, and what it has on the wire counts as unknown. Raise the "
            "one, or lower the other."
        )
    if settings.max_attempts > 1 and cap > max(LONG_WAIT_SECONDS, 10 * lease):
        found.append(
            f"DISPATCHER_RETRY_CAP_SECONDS ({cap:g}) is far above DISPATCHER_LEASE_SECONDS ({lease:g}): an email stays "
            "leased while it waits for its next attempt. If its host vanishes in that time, no other host sends the "
            "email before the lease ends. Lower the one, or raise the other."
        )
    return tuple(found)


def _absences(needs: Collection[str], origins: Mapping[str, Origin], settings: Settings) -> list[str]:
    return [
        f"{origins[name].variable} is not set: {_REMEDIES[name]}."
        for name in _REMEDIES
        if name in needs and not getattr(settings, name) and origins[name].text is None
    ]


def _contradictions(settings: Settings, needs: Collection[str], origins: Mapping[str, Origin]) -> list[str]:
    mistakes = _absences(needs, origins, settings)
    # Who looks or enqueues sends nothing, and may lack what sending takes.
    if "providers" in needs:
        mistakes += _provider_gaps(settings)
    mistakes += _alert_gaps(settings)
    if settings.queue == settings.dlq:
        mistakes.append("DISPATCHER_DLQ names the same queue as DISPATCHER_QUEUE: give the dead letters their own.")
    if 0 < settings.retain_emails_days < settings.retain_content_days:
        mistakes.append(
            "DISPATCHER_RETAIN_CONTENT_DAYS is longer than DISPATCHER_RETAIN_EMAILS_DAYS: content goes first; lower it."
        )
    if settings.retain_keys_days and not 0 < settings.retain_emails_days <= settings.retain_keys_days:
        mistakes.append(
            "DISPATCHER_RETAIN_KEYS_DAYS is shorter than DISPATCHER_RETAIN_EMAILS_DAYS: keys go last; raise it."
        )
    if settings.retain_audit_days and not 0 < settings.retain_emails_days <= settings.retain_audit_days:
        mistakes.append(
            "DISPATCHER_RETAIN_AUDIT_DAYS is shorter than DISPATCHER_RETAIN_EMAILS_DAYS: what was done to an email is "
            "kept as long as the email; raise it."
        )
    if settings.retry_base_seconds > settings.retry_cap_seconds:
        mistakes.append("DISPATCHER_RETRY_BASE_SECONDS is above DISPATCHER_RETRY_CAP_SECONDS: lower it.")
    return mistakes


def _provider_gaps(settings: Settings) -> list[str]:
    mistakes = []
    if "smtp" in settings.providers and settings.smtp_url is None:
        mistakes.append("DISPATCHER_SMTP_URL is not set, but DISPATCHER_PROVIDERS names smtp: like smtp://host:587.")
    if "sendgrid" in settings.providers and not settings.sendgrid_api_key:
        mistakes.append("SENDGRID_API_KEY is not set, but DISPATCHER_PROVIDERS names sendgrid: set it to a key.")
    if "capture" in settings.providers and settings.capture_dir is None:
        mistakes.append("DISPATCHER_CAPTURE_DIR is not set, but DISPATCHER_PROVIDERS names capture: set a folder.")
    return mistakes


def _alert_gaps(settings: Settings) -> list[str]:
    """A channel that is half set up would be silent on the day that it is needed."""
    gaps = []
    if settings.alert_webhook_url and not settings.alert_webhook_secret:
        gaps.append(
            "DISPATCHER_ALERT_WEBHOOK_SECRET is not set, but DISPATCHER_ALERT_WEBHOOK_URL is: "
            "make one with: echo whsec_$(openssl rand -base64 32)."
        )
    mail = {
        "DISPATCHER_ALERT_SMTP_URL": settings.alert_smtp_url,
        "DISPATCHER_ALERT_EMAIL_FROM": settings.alert_email_from,
        "DISPATCHER_ALERT_EMAIL_TO": settings.alert_email_to,
    }
    missing = [name for name, value in mail.items() if not value]
    if 0 < len(missing) < len(mail):
        gaps.append(f"{' and '.join(missing)} not set: alerts by email need all of {', '.join(mail)}.")
    return gaps


def has_default(setting_field: Field[Any]) -> bool:
    """Whether the setting stands at something useful when its variable is unset."""
    return setting_field.metadata["default"] is not None and setting_field.default is not MISSING
