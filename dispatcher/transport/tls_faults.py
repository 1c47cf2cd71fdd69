"""Why a TLS handshake failed, and what an operator can do about it."""

from __future__ import annotations

import ssl
from typing import Final

from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault

_CHAIN: Final = "Set DISPATCHER_CA_FILE to the authority that signed it. Or install the whole chain on the server."
_NAME: Final = "Correct the host in {url}, or install a certificate for this host on the server."
_WEAK: Final = "Replace the server's certificate: its key or its signature is too weak."
_OLD: Final = "Update the server: it needs TLS 1.2 or newer, ECDHE, or a Diffie-Hellman key of at least 2048 bits."
_PLAIN: Final = "Check the scheme and the port in {url}."
_CLIENT: Final = "Allow clients without a certificate, or correct {url}."

_CERTIFICATES: Final[dict[int, str]] = {
    9: "Correct this host's clock.",
    10: "Renew the server's certificate. If it is not expired, correct this host's clock.",
    **dict.fromkeys((2, 18, 19, 20, 21), _CHAIN),
    23: "Replace the server's certificate: its authority has revoked it.",
    **dict.fromkeys((62, 64), _NAME),
    **dict.fromkeys((66, 67, 68), _WEAK),
}
"""The remedy for each verification error of OpenSSL (X509_V_ERR_… in openssl/x509_vfy.h)."""
_OTHER_CERTIFICATE: Final = "Replace the server's certificate."

_REASONS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "the server does not answer with TLS",
        _PLAIN,
        "WRONG_VERSION_NUMBER HTTP_REQUEST PACKET_LENGTH_TOO_LONG RECORD_LAYER_FAILURE",
    ),
    (
        "the server supports only old versions of TLS",
        _OLD,
        "UNSUPPORTED_PROTOCOL TLSV1_ALERT_PROTOCOL_VERSION WRONG_SSL_VERSION",
    ),
    ("the server's Diffie-Hellman key is too small", _OLD, "DH_KEY_TOO_SMALL"),
    (
        "the server's signature or renegotiation is not secure",
        _OLD,
        "WRONG_SIGNATURE_TYPE UNSAFE_LEGACY_RENEGOTIATION_DISABLED LEGACY_SIGALG_DISALLOWED_OR_UNSUPPORTED",
    ),
    (
        "the server supports no cipher that we accept",
        _OLD,
        "SSLV3_ALERT_HANDSHAKE_FAILURE TLSV1_ALERT_INSUFFICIENT_SECURITY WRONG_CIPHER_RETURNED",
    ),
    (
        "the server requires a client certificate, which we do not support",
        _CLIENT,
        "TLSV13_ALERT_CERTIFICATE_REQUIRED SSLV3_ALERT_NO_CERTIFICATE SSLV3_ALERT_BAD_CERTIFICATE",
    ),
    ("the server has no certificate for this host", _NAME, "TLSV1_UNRECOGNIZED_NAME"),
)
"""What happened, the remedy, and the reasons of OpenSSL (SSL_R_… in openssl/sslerr.h)."""
_BY_REASON: Final = {reason: (words, remedy) for words, remedy, reasons in _REASONS for reason in reasons.split()}

_BROKEN_OFF: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The connection closed during the handshake, so a retry may succeed."""
_TEMPORARY: Final = frozenset({"TLSV1_ALERT_INTERNAL_ERROR"})


def cause_of_tls(error: ssl.SSLError) -> str:
    """Why the handshake failed, as a clause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate cannot be trusted: {scrub(error.verify_message).rstrip('.')}"
    reason = error.reason or type(error).__name__
    return f"{_BY_REASON.get(reason, ('the handshake failed', ''))[0]} ({reason})"


def tls_fault(provider: str, server: str, error: BaseException | None, *, url: str) -> ProviderFault | None:
    """The provider's fault if TLS with its server cannot succeed before an operator corrects something; else None.

    Args:
        server: The server's name in the message, such as `SendGrid`.
        url: The setting with the server's URL.
    """
    if not isinstance(error, ssl.SSLError) or isinstance(error, _BROKEN_OFF) or error.reason in _TEMPORARY:
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = _CERTIFICATES.get(error.verify_code, _OTHER_CERTIFICATE)
    else:
        remedy = _BY_REASON.get(error.reason, ("", _PLAIN))[1]
    return ProviderFault(provider, f"TLS with {server} failed: {cause_of_tls(error)}.", remedy=remedy.format(url=url))
