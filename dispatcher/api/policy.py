"""What this API allows of what an email may be: narrower than the domain, for who asks over a network."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.config import Settings
from dispatcher.domain.email import Email
from dispatcher.domain.filename import endings_of
from dispatcher.errors import InvalidEmail


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits that an operator has set.

    Attributes:
        denied_types: Endings of filenames, and whole content types, that no attachment may have.
        headers: Names of headers, and beginnings of names, that an email may set.
        allowed_headers: Headers that command a provider and are allowed nevertheless.
    """

    recipients: int
    attachments: int
    attachment_bytes: int
    denied_endings: frozenset[str]
    headers: frozenset[str]
    header_beginnings: tuple[str, ...]
    allowed_headers: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """The policy that the settings are."""
        allowed = [name.lower() for name in settings.api_allowed_headers]
        return cls(
            recipients=settings.api_max_recipients,
            attachments=settings.api_max_attachments,
            attachment_bytes=settings.api_max_attachment_bytes,
            denied_endings=frozenset(ending.lower().lstrip(".") for ending in settings.api_denied_extensions),
            headers=frozenset(name for name in allowed if not name.endswith("*")),
            header_beginnings=tuple(name[:-1] for name in allowed if name.endswith("*")),
            allowed_headers=settings.allowed_provider_headers,
        )

    def check(self, email: Email) -> None:
        """Asserts that an email is allowed.

        Raises:
            InvalidEmail: with the first field that is not.
        """
        recipients = len(email.to) + len(email.cc) + len(email.bcc)
        if recipients > self.recipients:
            raise InvalidEmail("to", f"and cc and bcc have more than {self.recipients} recipients together")
        for name in email.headers:
            lowered = name.lower()
            if lowered not in self.headers and not lowered.startswith(self.header_beginnings):
                raise InvalidEmail(f"headers.{name}", "is a header that this API does not take")
        if email.attachments:
            self._check_attachments(email)

    def _check_attachments(self, email: Email) -> None:
        if len(email.attachments) > self.attachments:
            raise InvalidEmail("attachments", f"has more than {self.attachments} entries")
        octets = 0
        for index, file in enumerate(email.attachments):
            octets += len(file.content)
            if octets > self.attachment_bytes:
                field = f"attachments[{index}].content"
                raise InvalidEmail(field, f"makes attachments exceed {self.attachment_bytes} octets together")
            endings = endings_of(file.filename)
            # Windows opens `a.{…}` with the class that the braces name.
            if not self.denied_endings.isdisjoint(endings) or any(ending.startswith("{") for ending in endings):
                raise InvalidEmail(f"attachments[{index}].filename", "has an ending that is not allowed")
            if file.content_type.lower() in _PROGRAMS:
                raise InvalidEmail(f"attachments[{index}].content_type", "is a program's, which is not allowed")


_PROGRAMS = frozenset(
    {
        # What Outlook refuses, and other names of the same types.
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
