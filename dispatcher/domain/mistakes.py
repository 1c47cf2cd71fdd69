"""All mistakes in the JSON of a message. `message_from_json` stops at the first, because most messages have none.

Each field is read alone, in a message whose other fields are valid, and then all fields together. So the rules are
those of the messages, and a search takes a few times as long as reading the message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from dispatcher.domain.email import Email
from dispatcher.domain.sms import SMS_CHANNEL, Sms, message_from_json
from dispatcher.errors import InvalidEmail

MAX_MISTAKES: Final = 20
_VALID: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("from", "to"), "x@example.com"),
    **dict.fromkeys(("message_key", "subject", "text", "html", "template_id"), "x"),
}
_VALID_SMS: Final[Mapping[str, Any]] = {"channel": SMS_CHANNEL, "message_key": "x", "to": "+4915112345678", "text": "x"}
_TEMPLATE: Final = ("template_id", "template_data")
_BODIES: Final = ("text", "html")


def all_mistakes(
    document: Mapping[str, Any], first: InvalidEmail, *, allowed_headers: Collection[str] = ()
) -> list[InvalidEmail]:
    """The mistakes in the JSON object of a message, at most MAX_MISTAKES. `first` is the one that reading it raised."""
    if document.get("raw") is not None:
        return [first]  # the fields of the content are in the message
    search = _Search(document, allowed_headers)
    found = {each.field: each for each in islice(search.alone(), MAX_MISTAKES)}
    for each in search.together({name.partition("[")[0].partition(".")[0] for name in found}):
        found.setdefault(each.field, each)
    found.setdefault(first.field, first)
    return list(found.values())[:MAX_MISTAKES]


class _Search:
    def __init__(self, document: Mapping[str, Any], allowed_headers: Collection[str]) -> None:
        self._document = document
        self._allowed_headers = allowed_headers
        is_sms = document.get("channel") == SMS_CHANNEL
        self._fields = (Sms if is_sms else Email).by_json_name
        self._valid = _VALID_SMS if is_sms else _VALID

    def _fault(self, document: Mapping[str, Any]) -> InvalidEmail | None:
        try:
            message_from_json(document, allowed_headers=self._allowed_headers)
        except InvalidEmail as error:
            # Their frames would refer to the list of the errors, and so keep the request's body in memory.
            error.__context__ = None
            return error.with_traceback(None)
        return None

    def _fault_alone(self, name: str, value: object) -> InvalidEmail | None:
        others = {each: valid for each, valid in self._valid.items() if each not in _TEMPLATE}
        if name in _TEMPLATE:  # cannot be combined with bodies
            others = {each: valid for each, valid in self._valid.items() if each not in _BODIES}
        return self._fault({**others, name: value})

    def alone(self) -> Iterator[InvalidEmail]:
        """The mistakes of each field, and of each entry of a list or of the headers."""
        for name, value in self._document.items():
            if name == "channel" or value is None or value in ("", [], {}):
                continue  # what is empty may be wrong only together with other fields
            error = self._fault_alone(name, value)
            if error is None:
                continue
            if error.field.startswith(f"{name}[") and isinstance(value, list):
                yield from self._in_list(name, value)
            elif error.field.startswith(f"{name}.") and isinstance(value, dict):
                parts = (self._fault_alone(name, {each: text}) for each, text in value.items())
                yield from (each for each in parts if each is not None)
            elif error.field == name or name not in self._fields:
                yield error

    def _in_list(self, name: str, listed: list[object]) -> Iterator[InvalidEmail]:
        kind = self._fields[name].kind
        for at, item in enumerate(listed):
            try:
                kind.read(name, [item] if kind.decode is None else kind.decode(name, [item]))
            except InvalidEmail as error:
                yield InvalidEmail(error.field.replace("[0]", f"[{at}]", 1), error.reason)

    def together(self, faulty: set[str]) -> Iterator[InvalidEmail]:
        """What is missing, and which fields do not fit each other. Replaces each faulty field by a valid one."""
        given = {name: _short(name, value) for name, value in self._document.items() if name in self._fields}
        given |= {name: self._valid.get(name) for name in faulty & self._fields.keys()}
        if "channel" in self._valid:
            given["channel"] = SMS_CHANNEL
        replaced = set(faulty)
        while (error := self._fault(given)) is not None and error.field not in replaced:
            yield error
            replaced.add(error.field)
            given[error.field] = self._valid.get(error.field)


def _short(name: str, value: object) -> object:
    """A value that is as good together with others, and takes no time to read."""
    if name in ("attachments", "headers"):
        return None
    if isinstance(value, list):
        return value[:1]
    return "x" if name in _BODIES and value and isinstance(value, str) else value
