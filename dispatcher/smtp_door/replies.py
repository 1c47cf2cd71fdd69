"""The words of SMTP replies: an enhanced status code (RFC 3463), what happened, and what to do."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from dispatcher.admission.problems import PROBLEM_TYPES, Problem

_MOST_CHARACTERS: Final = 480
"""A reply line has at most 512 octets (RFC 5321, section 4.5.3.1.5)."""
_CODES: Final = MappingProxyType(
    {
        "rate-limited": "450 4.7.1",
        "quota-exceeded": "450 4.7.1",
        "overloaded": "451 4.3.1",
        "database-unavailable": "451 4.3.0",
        "idempotency-key-in-use": "451 4.3.0",
        "internal-error": "451 4.3.0",
        "sender-forbidden": "550 5.7.1",
        "insufficient-scope": "550 5.7.1",
        "lane-forbidden": "550 5.7.1",
        "email-not-allowed": "554 5.7.1",
    }
)
"""The status of each problem; all others mean that the message is invalid: 554 5.6.0."""

OF_LIBRARY: Final = MappingProxyType(
    {
        "530 5.7.0 Authentication required": "530 5.7.0 Log in first: AUTH PLAIN or AUTH LOGIN, with an API key as the "
        "password.",
        "530 Must issue a STARTTLS command first": "530 5.7.0 Encrypt first: set your client to STARTTLS.",
        "538 5.7.11 Encryption required for requested authentication mechanism": "538 5.7.11 Encrypt first: set your "
        "client to STARTTLS.",
        "504 5.5.4 Unrecognized authentication type": "504 5.5.4 This server has AUTH PLAIN and AUTH LOGIN only.",
        "500 Command line too long": "500 5.5.2 The command is too long.",
        "500 Error: bad syntax": "500 5.5.2 The command is not valid.",
        "503 Error: send HELO first": "503 5.5.1 Send EHLO first.",
        "503 Error: send EHLO first": "503 5.5.1 Send EHLO first.",
        "503 Error: nested MAIL command": "503 5.5.1 A message has begun already. Send RSET first.",
        "503 Error: need MAIL command": "503 5.5.1 Send MAIL first.",
        "503 Already authenticated": "503 5.5.1 You are logged in already.",
        "500 Error: command 'AUTH' not recognized": "503 5.5.1 Send EHLO instead of HELO, then AUTH.",
        "555 MAIL FROM parameters not recognized or not implemented": "555 5.5.4 MAIL has an unknown parameter.",
        "555 RCPT TO parameters not recognized or not implemented": "555 5.5.4 RCPT has an unknown parameter.",
        "552 Error: message size exceeds fixed maximum message size": "552 5.3.4 The message is larger than this "
        "server allows. Send a smaller message.",
        "553 5.1.3 Error: malformed address": "553 5.1.3 The address is not valid. Write it as <name@example.org>.",
        "501 Syntax: MAIL FROM: <address> [SP <mail-parameters>]": "501 5.5.4 Write MAIL FROM:<name@example.org>.",
        "501 Syntax: RCPT TO: <address> [SP <mail-parameters>]": "501 5.5.4 Write RCPT TO:<name@example.org>.",
        "250 OK": "250 2.0.0 OK",
        "221 Bye": "221 2.0.0 Bye",
    }
)
"""Our words for replies of aiosmtpd."""


def of_problem(problem: Problem) -> str:
    """The reply for a problem. Problems repeat no values of the message."""
    mistakes = [
        f"{'The message' if each.name == '#/raw' else each.name.removeprefix('#/')} {each.detail}."
        for each in problem.errors[:3]
    ]
    sentences = [PROBLEM_TYPES[problem.code].title, *mistakes, problem.detail or ""]
    text = " ".join(filter(None, sentences)).encode("ascii", "replace").decode()
    return f"{_CODES.get(problem.code, '554 5.6.0')} {' '.join(text.split())[:_MOST_CHARACTERS]}"
