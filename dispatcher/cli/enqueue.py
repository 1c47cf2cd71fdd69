"""`dispatcher enqueue`: enqueues one email given by options, or a file of emails."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import orjson

from dispatcher.cli.environment import load_settings, read_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import Age, Instant, json_option, known_lane
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.domain.calendar import Calendar
from dispatcher.domain.email import Email, EmailOptions
from dispatcher.domain.message import FIELDS, Message, Stated
from dispatcher.domain.outgoing import EMAIL_CHANNEL, Attachment
from dispatcher.domain.sms import Sms
from dispatcher.domain.text import shown
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.providers.capabilities import capabilities_of, capability_gap

_WHY_A_KEY: Final = (
    "--key is missing. It is your own unique name for this email, such as order-17-receipt. A second enqueue with the "
    "same key creates no second email, so a command that runs twice sends one email."
)
_NAMES: Final = {
    "message_key": "key",
    "sender": "from",
    "template_id": "template",
    "headers": "header",
    "attachments": "attach",
    "raw": "mime",
    "tags": "tag",
    "tenant_id": "tenant",
}
"""The options that are not named as their field."""
_SEPARATORS: Final = {":": "colon", "=": "equals sign"}
_TYPES: Final = {
    "attachments": click.Path(exists=True, dir_okay=False, path_type=Path),
    "calendar": click.Path(exists=True, dir_okay=False, path_type=Path),
    "raw": click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    "send_at": Instant(),
    "expires_at": Instant(),
}


def _flag(field: str) -> str:
    return f"--{_NAMES.get(field, field).replace('_', '-')}"


def _options() -> Iterator[click.Parameter]:
    yield click.Option(
        ["--file"], type=click.File("rb"), metavar="PATH", help="A file of emails as JSON Lines; - is stdin."
    )
    about = "Enqueue an SMS. Needs --key, exactly one --to with a phone number, and --text or --text-file."
    yield click.Option(["--sms", "is_sms"], is_flag=True, help=about)
    for field in FIELDS:
        yield _option(field)
        if field.name in ("text", "html"):
            kind = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
            about = f"A UTF-8 file with the value of --{field.name}; - is stdin."
            yield click.Option([f"--{field.name}-file"], type=kind, metavar="PATH", help=about)
    about = (
        "Like --expires-at, but as a length of time, such as 10m or 2h. It counts from --send-at if that is given, "
        "otherwise from now."
    )
    yield click.Option(["--expires-in"], type=Age(), metavar="DURATION", help=about)


def _option(field: Stated) -> click.Option:
    names = Email.by_json_name
    about = re.sub(r"`(\w+)`", lambda found: _flag(found[1]) if found[1] in names else found[0], field.about)
    schema, is_list = field.kind.schema, field.default == () or field.name in ("headers", "metadata")
    choice = click.Choice(schema["enum"]) if "enum" in schema else None
    is_flag = schema.get("type") == "boolean"
    return click.Option(
        [_flag(field.name), field.name],
        type=choice or _TYPES.get(field.name),
        is_flag=is_flag,
        multiple=is_list,
        metavar=None if is_flag or choice else field.kind.metavar,
        help=f"{about} Repeatable." if is_list else about,
    )


@click.command("enqueue", params=list(_options()))
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
      dispatcher enqueue --key meeting-4 --from ann@example.com --to bob@example.org --subject Meeting \\
                         --text 'Please join.' --calendar invite.ics
      dispatcher enqueue --key order-17-receipt --mime receipt.eml
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

    --mime takes a whole MIME message, such as a signed email. Its recipients are those of --to, if given; otherwise the
    addresses in To, Cc and Bcc. If the fields of an email cannot say everything that the message says, only the
    providers ses and smtp can send it.

    A file has one JSON object per line, with the fields FIELDS. An attachment is an object with the fields filename,
    content_type and content (in base64), and content_id for an inline image. Templates need the provider resend,
    sendgrid or ses. For an SMS, add "channel": "sms", and give a phone number in `to`.

    The command reports each invalid line by its number, and enqueues all valid lines. After an interruption, run the
    same command again: emails that are already enqueued are not enqueued twice.

    If DISPATCHER_PROVIDERS is set, the command refuses an email that none of these providers can send: for example, an
    email with a template if only smtp is configured.

    Exit codes: 0 no email was refused (each is new or already known); 1 all emails were refused, or the
    command stopped before the end of the file; 3 only some emails were refused.
    """
    if file is None:
        return _enqueue_one(_message(options, Sms if is_sms else Email), as_json=as_json)
    if is_sms:
        raise click.UsageError('--file and --sms cannot be combined. Add "channel": "sms" to each line that is an SMS.')
    if given := [name for name, value in options.items() if value]:
        raise click.UsageError(
            f"--file and {_flag(given[0])} cannot be combined: with --file, each line describes a whole email."
        )
    from dispatcher.cli.email_file import enqueue_file

    return enqueue_file(load_settings("database_url", reads_own=True), file, as_json=as_json)


command.help = (command.help or "").replace("FIELDS", ", ".join(Email.by_json_name))


def _enqueue_one(email: Message, *, as_json: bool) -> Exit:
    """Enqueues one email and prints its id. Raises DispatcherError."""
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


def _message(options: dict[str, Any], kind: type[Email | Sms]) -> Email | Sms:
    """The message that the options describe. An InvalidEmail names the option, such as `--from`."""
    if options["raw"] is not None:
        return _mime_email(options)
    check = _check_sms if kind is Sms else _check_email
    check(options)
    known_lane(options["lane"], "--lane")
    options |= {name: _body(name, options) for name in ("text", "html")} | _times(options)
    given = {each.name: options[each.name] for each in FIELDS if options[each.name] not in (None, (), False)}
    given["metadata"] = _pairs("--metadata", options["metadata"], "=", "order=4711")
    if kind is Sms:
        given["to"] = options["to"][0]
    else:
        given |= {
            "to": options["to"],
            "headers": _pairs("--header", options["headers"], ":", "X-Campaign: spring"),
            "attachments": [_attachment(path) for path in options["attachments"]],
            **({} if options["calendar"] is None else {"calendar": _calendar(options["calendar"])}),
            "template_data": _template_data(options["template_data"]),
            "allowed_headers": read_settings().allowed_provider_headers,
        }
    try:
        return kind(**given)
    except InvalidEmail as error:
        field = re.split(r"[.\[]", error.field)[0]
        raise InvalidEmail(_flag(field) + error.field[len(field) :], error.reason) from None


def _mime_email(options: dict[str, Any]) -> Email:
    """The email that --mime and the options describe that say nothing about its content."""
    path: Path = options["raw"]
    known = {"raw", "to", "expires_in", "message_key", *EmailOptions.__annotations__}
    if foreign := [name for name, value in options.items() if value and name not in known]:
        raise click.UsageError(f"--mime and {_flag(foreign[0])} cannot be combined: the message says this itself.")
    if not options["message_key"]:
        raise click.UsageError(_WHY_A_KEY)
    known_lane(options["lane"], "--lane")
    options |= _times(options)
    given = {name: options[name] for name in EmailOptions.__annotations__ if options[name] not in (None, (), False)}
    given["metadata"] = _pairs("--metadata", options["metadata"], "=", "order=4711")
    try:
        with click.open_file(str(path), "rb") as file:
            message: bytes = file.read()
    except OSError as error:
        raise click.UsageError(f"--mime {path} cannot be read: {error.strerror}.") from error
    try:
        return Email.from_mime(
            message,
            message_key=options["message_key"],
            recipients=options["to"] or None,
            allowed_headers=read_settings().allowed_provider_headers,
            **given,
        )
    except InvalidEmail as error:
        raise InvalidEmail(f"--mime {path.name}: {error.field}", error.reason) from None


def _calendar(path: Path) -> Calendar:
    try:
        return Calendar(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise click.UsageError(f"--calendar {path} cannot be read: {reason}.") from error
    except InvalidEmail as error:
        raise InvalidEmail(f"--calendar {path.name}", error.reason) from None


def _check_sms(options: dict[str, Any]) -> None:
    known = {*(each.name for each in Sms.by_json_name.values()), "text_file", "expires_in"}
    if foreign := [name for name, value in options.items() if value and name not in known]:
        raise click.UsageError(f"--sms and {_flag(foreign[0])} cannot be combined: an SMS consists only of a text.")
    if len(options["to"]) != 1:
        raise click.UsageError("An SMS needs one --to. Enqueue one SMS for each recipient.")
    if not options["message_key"]:
        raise click.UsageError(_WHY_A_KEY.replace("email", "SMS"))
    if options["text"] is None and options["text_file"] is None:
        raise click.UsageError("An SMS needs --text or --text-file.")


def _check_email(options: dict[str, Any]) -> None:
    missing = [] if options["sender"] else ["--from"]
    if options["subject"] is None and options["template_id"] is None:
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


def _pairs(option: str, given: tuple[str, ...], separator: str, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        name, found, value = text.partition(separator)
        if not found:
            raise click.UsageError(
                f"{option} {text!r} has no {_SEPARATORS[separator]}. For example, write {example!r}."
            )
        if name.strip() in pairs:
            raise click.UsageError(f"{option} {name.strip()} is given twice.")
        pairs[name.strip()] = value.strip()
    return pairs


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
