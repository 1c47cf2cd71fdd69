"""Limits for emails that arrive over the network. They are stricter than the rules of `dispatcher.domain`."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.config import Settings
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import endings_of
from dispatcher.domain.sms import Sms, SmsRules
from dispatcher.errors import InvalidEmail


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits that the settings DISPATCHER_API_* set."""

    recipients: int
    attachments: int
    attachment_bytes: int  # of all attachments together, decoded
    denied_extensions: frozenset[str]  # of filenames, in lower case, without the dot
    headers: frozenset[str]  # the names that an email may set, in lower case
    header_prefixes: tuple[str, ...]  # an email may also set headers whose names begin with one of these
    allowed_headers: tuple[str, ...]  # control a provider, such as X-MC-Tags, and may be set nevertheless
    sms: SmsRules

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        allowed = [name.lower() for name in settings.api_allowed_headers]
        return cls(
            recipients=settings.api_max_recipients,
            attachments=settings.api_max_attachments,
            attachment_bytes=settings.api_max_attachment_bytes,
            denied_extensions=frozenset(extension.lower().lstrip(".") for extension in settings.api_denied_extensions),
            headers=frozenset(name for name in allowed if not name.endswith("*")),
            header_prefixes=tuple(name[:-1] for name in allowed if name.endswith("*")),
            allowed_headers=settings.allowed_provider_headers,
            sms=settings.sms_rules,
        )

    def check(self, email: Message) -> None:
        """Raises InvalidEmail for the first field that is not allowed."""
        recipients = len(email.to) + len(email.cc) + len(email.bcc)
        if recipients > self.recipients:
            detail = f"together with cc and bcc has {recipients:,} recipients; this API allows {self.recipients:,}"
            raise InvalidEmail("to", detail)
        for name in email.headers:
            lowered = name.lower()
            if lowered not in self.headers and not lowered.startswith(self.header_prefixes):
                raise InvalidEmail(f"headers.{name}", "is a header that this API does not allow")
        if isinstance(email, Sms) and (fault := self.sms.fault(email.to[0], email.text)):
            raise fault
        if len(email.attachments) > self.attachments:
            raise InvalidEmail(
                "attachments", f"has {len(email.attachments):,} entries; this API allows {self.attachments:,}"
            )
        size = 0
        for index, file in enumerate(email.attachments):
            size += len(file.content)
            if size > self.attachment_bytes:
                field = f"attachments[{index}].content"
                raise InvalidEmail(field, f"makes the attachments exceed {self.attachment_bytes:,} bytes in total")
            extensions = endings_of(file.filename)
            # If a file's name is `a.{CLSID}`, Windows opens the file with the program that the CLSID identifies.
            if not self.denied_extensions.isdisjoint(extensions) or any(each.startswith("{") for each in extensions):
                raise InvalidEmail(f"attachments[{index}].filename", "has an extension that this API does not allow")
            if file.content_type.lower() in _PROGRAMS:
                raise InvalidEmail(
                    f"attachments[{index}].content_type",
                    "is the type of a program or script, which this API does not allow",
                )


_PROGRAMS = frozenset(
    {
        # The types that Outlook blocks, and other names of the same types.
        "application/ecmascript",
        "application/hta",
        "application/java-archive",
        "application/javascript",
        "application/msaccess",
        "application/prg",
        "application/vnd.ms-htmlhelp",
        "application/vnd.microsoft.portable-executable",
        "application/x-bat",
        "application/x-dosexec",
        "application/x-executable",
        "application/x-java-jnlp-file",
        "application/x-javascript",
        "application/x-ms-application",
        "application/x-ms-shortcut",
        "application/x-msdos-program",
        "application/x-msdownload",
        "application/x-msi",
        "application/x-powershell",
        "application/x-sh",
        "application/x-shellscript",
        "text/ecmascript",
        "text/javascript",
        "text/scriptlet",
        "text/vbscript",
    }
)
