"""`dispatcher enqueue`: enqueues one email given by options, or a file of emails."""

from __future__ import annotations

import mimetypes
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import orjson

from dispatcher.cli.environment import load_settings, read_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import Age, Instant, json_option, known_lane
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.domain.email import Email
from dispatcher.domain.email_rules import shown
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import EMAIL_CHANNEL, Attachment
from dispatcher.domain.sms import Sms
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.providers.capabilities import capabilities_of, capability_gap

_WHY_A_KEY: Final = (
    "--key is missing. It is your own unique name for this email, such as order-17-receipt. A second enqueue with the "
    "same key creates no second email, so a command that runs twice sends one email."
)
_File: Final = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)


@click.command("enqueue")
@click.option("--file", type=click.File("rb"), metavar="PATH", help="A file of emails as JSON Lines; - is stdin.")
@click.option(
    "--sms",
    "is_sms",
    is_flag=True,
    help="Enqueue an SMS. Needs --key, exactly one --to with a phone number, and --text or --text-file.",
)
@click.option("--key", "message_key", help="Your own unique name for the email.")
@click.option("--from", "sender", metavar="ADDRESS", help="The sender, such as 'Shop <shop@example.com>'.")
@click.option("--to", multiple=True, metavar="ADDRESS", help="A recipient. Repeatable.")
@click.option("--cc", multiple=True, metavar="ADDRESS", help="A Cc recipient. Repeatable.")
@click.option("--bcc", multiple=True, metavar="ADDRESS", help="A Bcc recipient. Repeatable.")
@click.option("--reply-to", multiple=True, metavar="ADDRESS", help="A Reply-To address. Repeatable.")
@click.option("--subject", help="The subject.")
@click.option("--text", help="The plain-text body.")
@click.option("--text-file", type=_File, metavar="PATH", help="A UTF-8 file with the plain-text body; - is stdin.")
@click.option("--html", help="The HTML body.")
@click.option("--html-file", type=_File, metavar="PATH", help="A UTF-8 file with the HTML body; - is stdin.")
@click.option(
    "--attach",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="PATH",
    help="A file to attach. Repeatable.",
)
@click.option("--template", "template_id", metavar="ID", help="The id of the provider's template for subject and body.")
@click.option("--template-data", metavar="JSON", help="A JSON object with the template's values.")
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="An additional header. Repeatable.")
@click.option("--tag", "tags", multiple=True, help="A tag for the provider's statistics. Repeatable.")
@click.option(
    "--tenant", "tenant_id", help="The tenant that owns the email; keys are unique per tenant.  [default: default]"
)
@click.option("--correlation-id", help="Your id of the request that caused the email; copied to logs and dead letters.")
@click.option(
    "--on-uncertain",
    type=click.Choice([policy.value for policy in OnUncertain]),
    help="What to do if the outcome of an attempt is unknown: `hold` the email for an operator, or `resend` it. With "
    "`resend`, the recipient might get the email twice.  [default: DISPATCHER_ON_UNCERTAIN]",
)
@click.option(
    "--erase-after-sending", is_flag=True, help="Delete the content (such as a one-time code) after the email is sent."
)
@click.option(
    "--ignore-suppression", is_flag=True, help="Send to suppressed recipients, too: for emails such as a legal notice."
)
@click.option(
    "--send-at", type=Instant(), metavar="TIME", help="Do not send before this time, such as 2026-12-24T18:00:00+01:00."
)
@click.option(
    "--expires-at",
    type=Instant(),
    metavar="TIME",
    help="From this time on, do not send the email, but cancel it.",
)
@click.option(
    "--expires-in",
    type=Age(),
    metavar="DURATION",
    help="Like --expires-at, but as a length of time, such as 10m or 2h. It counts from --send-at if that is given, "
    "otherwise from now.",
)
@click.option("--lane", help="The lane, such as urgent.  [default: the sender's lane (see `lanes set`), or normal]")
@json_option()
def command(file: BinaryIO | None, *, is_sms: bool, as_json: bool, **options: Any) -> int:
    """Enqueue one email, or a file of emails with --file. `dispatcher run` sends them.

    \b
    Examples:
      dispatcher enqueue --key order-17-receipt --from 'Shop <shop@example.com>' \\
                         --to ann@example.org --subject Receipt --text-file receipt.txt --attach receipt.pdf
      dispatcher enqueue --key login-4711 --from login@example.com --to ann@example.org --subject 'Your code' \\
                         --text '4711 is your code.' --erase-after-sending --expires-in 10m
      dispatcher enqueue --key order-17-receipt --from shop@example.com --to ann@example.org \\
                         --template d-0c1a --template-data '{"number": 17}'
      dispatcher enqueue --sms --key login-4711 --to +4915112345678 --text '4711 is your code.' --expires-in 10m
      dispatcher enqueue --file emails.jsonl
      make-emails | dispatcher enqueue --file - --json

    \b
    A line of a file:
      {"message_key": "order-17-receipt", "from": "shop@example.com", "to": ["ann@example.org"],
       "subject": "Receipt", "text": "Thank you."}

    Needs DISPATCHER_DATABASE_URL. Run `dispatcher init` first. The command is safe to repeat: a second enqueue with the
    same key and content reports "already known" and changes nothing. The same key with different content is refused.

    The times send_at and expires_at are part of the content. Without --send-at, --expires-in counts from now, so each
    run of the same command has a different expires_at, and the second run is refused. To be able to repeat the command,
    use --expires-at instead.

    A file has one JSON object per line, with the fields message_key, from, to, cc, bcc, reply_to, subject, text, html,
    template_id, template_data, headers, attachments, tags, tenant_id, correlation_id, on_uncertain,
    erase_after_sending, ignore_suppression, send_at, expires_at and lane. An attachment is an object with the fields
    filename, content_type and content (in base64). Templates need the provider resend, sendgrid or ses. For an SMS, add
    "channel": "sms", and give a phone number in `to`.

    The command reports each invalid line by its number, and enqueues all valid lines. After an interruption, run the
    same command again: emails that are already enqueued are not enqueued twice.

    If DISPATCHER_PROVIDERS is set, the command refuses an email that none of these providers can send: for example, an
    email with a template if only smtp is configured.

    Exit codes: 0 no email was refused (each is new or already known); 1 all emails were refused, or the
    command stopped before the end of the file; 3 only some emails were refused.
    """
    if file is None:
        return _enqueue_one(_sms(options) if is_sms else _email(options), as_json=as_json)
    if is_sms:
        raise click.UsageError('--file and --sms cannot be combined. Add "channel": "sms" to each line that is an SMS.')
    if given := [name for name, value in options.items() if value]:
        raise click.UsageError(
            f"--file and {_option_name(given[0])} cannot be combined: with --file, each line describes a whole email."
        )
    from dispatcher.cli.email_file import enqueue_file

    return enqueue_file(load_settings("database_url", reads_own=True), file, as_json=as_json)


def _enqueue_one(email: Message, *, as_json: bool) -> Exit:
    """Enqueues one email and prints its id.

    Raises:
        DispatcherError: no configured provider can send the email, or its key belongs to an email with different
            content.
    """
    from dispatcher.producers import enqueue
    from dispatcher.store.connections import connected

    settings = load_settings("database_url", reads_own=isinstance(email, Sms))
    if isinstance(email, Sms) and (fault := settings.sms_rules.fault(email.to[0], email.text)):
        raise InvalidEmail(f"--{fault.field}", fault.reason)
    if why := capability_gap(email, capabilities_of(settings.providers)):
        kind = "Email" if email.channel == EMAIL_CHANNEL else email.channel.upper()
        raise DispatcherError(f'{kind} "{email.message_key}": {why.message}', remedy=why.remedy)
    with connected(settings.database_url, name="dispatcher enqueue") as connection, connection.transaction():
        answer = enqueue(connection, email)
    for warning in answer.warnings:
        say(f"Warning: {warning}")
    if as_json:
        warnings = {"warnings": answer.warnings} if answer.warnings else {}
        document = {"email_id": answer.email_id, "message_key": answer.message_key, "acceptance": answer.acceptance}
        print_json({**document, **warnings})
    else:
        print_data(f"{'already known' if answer.acceptance == 'known' else 'accepted'}: {answer.email_id}")
    return Exit.DONE


def _email(options: dict[str, Any]) -> Email:
    """The email that the options describe.

    Raises:
        UsageError: options are missing or contradict each other.
        InvalidEmail: a field of the email is invalid; the error's `field` is the option, such as `--from`.
    """
    _check_presence(options)
    flags = ("erase_after_sending", "ignore_suppression")
    listed = ("to", "cc", "bcc", "reply_to", "tags")
    known_lane(options["lane"], "--lane")
    optional = ("subject", "template_id", "tenant_id", "correlation_id", "on_uncertain", "lane")
    arguments = {
        "headers": _headers(options["headers"]),
        "attachments": [_attachment(path) for path in options["attach"]],
        "text": _body("text", options),
        "html": _body("html", options),
        "template_data": _template_data(options["template_data"]),
        "allowed_headers": read_settings().allowed_provider_headers,
        **_times(options),
        **{name: options[name] for name in ("message_key", "sender", *flags, *listed)},
        **{name: options[name] for name in optional if options[name] is not None},
    }
    try:
        return Email(**arguments)
    except InvalidEmail as error:
        parameter = error.field.partition(".")[0].partition("[")[0]
        raise InvalidEmail(_option_name(parameter) + error.field[len(parameter) :], error.reason) from None


def _sms(options: dict[str, Any]) -> Sms:
    """The SMS that the options describe. Raises the same errors as `_email`."""
    known = (
        *("message_key", "sender", "to", "text", "text_file", "tags", "tenant_id", "correlation_id", "on_uncertain"),
        *("erase_after_sending", "ignore_suppression", "send_at", "expires_at", "expires_in", "lane"),
    )
    if foreign := [name for name, value in options.items() if value and name not in known]:
        raise click.UsageError(
            f"--sms and {_option_name(foreign[0])} cannot be combined: an SMS consists only of a text."
        )
    if len(options["to"]) != 1:
        raise click.UsageError("An SMS needs one --to. Enqueue one SMS for each recipient.")
    if not options["message_key"]:
        raise click.UsageError(_WHY_A_KEY.replace("email", "SMS"))
    if (text := _body("text", options)) is None:
        raise click.UsageError("An SMS needs --text or --text-file.")
    known_lane(options["lane"], "--lane")
    plain = ("message_key", "tags", "erase_after_sending", "ignore_suppression")
    optional = ("sender", "tenant_id", "correlation_id", "on_uncertain", "lane")
    arguments = {
        "to": options["to"][0],
        "text": text,
        **_times(options),
        **{name: options[name] for name in plain},
        **{name: options[name] for name in optional if options[name] is not None},
    }
    try:
        return Sms(**arguments)
    except InvalidEmail as error:
        raise InvalidEmail(_option_name(error.field.partition("[")[0]), error.reason) from None


def _check_presence(options: dict[str, Any]) -> None:
    has_template = options["template_id"] is not None
    missing = [] if options["sender"] else ["--from"]
    if options["subject"] is None and not has_template:
        missing.append("--subject")
    if not (options["to"] or options["cc"] or options["bcc"]):
        missing.append("--to (or --cc, --bcc)")
    if all(options[name] is None for name in ("text", "text_file", "html", "html_file", "template_id")):
        missing.append("--text, --html or --template (or --text-file, --html-file)")
    sentences = [] if options["message_key"] else [_WHY_A_KEY]
    if missing:
        sentences.append(f"An email also needs {', '.join(missing)}.")
    if sentences:
        raise click.UsageError("\n".join(sentences))


def _body(kind: str, options: dict[str, Any]) -> str | None:
    text: str | None = options[kind]
    path: Path | None = options[f"{kind}_file"]
    if path is None:
        return text
    if text is not None:
        raise click.UsageError(f"--{kind} and --{kind}-file are both given. Give only one.")
    try:
        with click.open_file(str(path), "rb") as file:
            content: bytes = file.read()
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise click.UsageError(f"--{kind}-file {path} cannot be read: {reason}.") from error


def _times(options: dict[str, Any]) -> dict[str, datetime]:
    times: dict[str, datetime] = {
        name: options[name] for name in ("send_at", "expires_at") if options[name] is not None
    }
    if (seconds := options["expires_in"]) is not None:
        if "expires_at" in times:
            raise click.UsageError("--expires-at and --expires-in are both given. Give only one.")
        times["expires_at"] = times.get("send_at", datetime.now(UTC)) + timedelta(seconds=seconds)
    return times


def _template_data(given: str | None) -> Any:
    try:
        return {} if given is None else orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise click.UsageError(f"--template-data is not JSON ({error.msg}, character {error.pos + 1}).") from None


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon:
            raise click.UsageError(f"--header {text!r} has no colon. For example, write 'X-Campaign: spring'.")
        if name.strip() in headers:
            raise click.UsageError(f"--header {name.strip()} is given twice.")
        headers[name.strip()] = value.strip()
    return headers


def _attachment(path: Path) -> Attachment:
    content_type, encoding = mimetypes.guess_type(path.name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise click.UsageError(f"--attach {path} cannot be read: {error.strerror}.") from error
    if not content_type or encoding:
        content_type = "application/octet-stream"
    try:
        return Attachment(path.name, content_type, content)
    except InvalidEmail as error:
        raise InvalidEmail(f"--attach {shown(path.name)}", error.reason) from None


def _option_name(parameter: str) -> str:
    """The command-line option for a parameter, such as `--from` for `sender`."""
    option = next(each for each in command.params if each.name == {"attachments": "attach"}.get(parameter, parameter))
    return option.opts[0]
