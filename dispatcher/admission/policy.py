"""Limits for emails that arrive over the network. They are stricter than the rules of `dispatcher.domain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dispatcher.config import Settings
from dispatcher.domain.headers import is_reserved
from dispatcher.domain.message import Message
from dispatcher.domain.mime_body import files_in
from dispatcher.domain.outgoing import endings_of
from dispatcher.domain.raw_mime import names_in
from dispatcher.domain.sms import Sms
from dispatcher.errors import InvalidEmail


class Policy:
    """The limits that the settings DISPATCHER_API_* set, and the providers' headers that they allow."""

    def __init__(self, settings: Settings) -> None:
        allowed = [name.lower() for name in settings.api_allowed_headers]
        self.settings = settings
        self._denied_extensions = frozenset(each.lower().lstrip(".") for each in settings.api_denied_extensions)
        self._headers = frozenset(name for name in allowed if not name.endswith("*"))
        self._sms = settings.sms_rules
        self._prefixes = tuple(name[:-1] for name in allowed if name.endswith("*"))

    def faults(self, email: Message) -> Iterator[InvalidEmail]:
        recipients = len(email.to) + len(email.cc) + len(email.bcc)
        if recipients > (allowed := self.settings.api_max_recipients):
            detail = f"together with cc and bcc has {recipients:,} recipients; this API allows {allowed:,}"
            yield InvalidEmail("to", detail)
        raw_names = () if email.raw is None else [name for name in names_in(email.raw) if not is_reserved(name)]
        for name in (*email.headers, *raw_names):
            if not self.allows_header(name):
                yield InvalidEmail(f"headers.{name}", "is a header that this API does not allow")
        if isinstance(email, Sms) and (fault := self._sms.fault(email.to[0], email.text)):
            yield fault
        if email.raw is None:
            yield from self._file_faults(
                [(each.filename, each.content_type, len(each.content)) for each in email.attachments]
            )
        else:
            yield from _within_raw(self._file_faults(files_in(email.raw)))

    def _file_faults(self, files: Iterable[tuple[str, str, int]]) -> Iterator[InvalidEmail]:
        files = list(files)
        if len(files) > (allowed := self.settings.api_max_attachments):
            yield InvalidEmail("attachments", f"has {len(files):,} entries; this API allows {allowed:,}")
        size = 0
        for index, (filename, content_type, octets) in enumerate(files):
            size += octets
            if size > (allowed := self.settings.api_max_attachment_bytes):
                field = f"attachments[{index}].content"
                yield InvalidEmail(field, f"makes the attachments exceed {allowed:,} bytes in total")
            extensions = endings_of(filename)
            # If a file's name is `a.{CLSID}`, Windows opens the file with the program that the CLSID identifies.
            if not self._denied_extensions.isdisjoint(extensions) or any(each.startswith("{") for each in extensions):
                yield InvalidEmail(f"attachments[{index}].filename", "has an extension that this API does not allow")
            if content_type.lower() in _PROGRAMS:
                yield InvalidEmail(
                    f"attachments[{index}].content_type",
                    "is the type of a program or script, which this API does not allow",
                )

    def allows_header(self, name: str) -> bool:
        lowered = name.lower()
        return lowered in self._headers or lowered.startswith(self._prefixes)


def _within_raw(faults: Iterator[InvalidEmail]) -> Iterator[InvalidEmail]:
    """The faults of a raw message's files, which have no field of their own."""
    try:
        for each in faults:
            yield InvalidEmail("raw", f"has a file that is refused: {each.field} {each.reason}")
    except InvalidEmail as error:  # the files cannot be found
        yield error


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
