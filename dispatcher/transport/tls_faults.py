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

_CERTIFICATES: Final[dict[int, str]] = {
    9: "Correct this host's clock.",
    10: "Renew the server's certificate. If it is not expired, correct this host's clock.",
    **dict.fromkeys((2, 18, 19, 20, 21), _CHAIN),
    **dict.fromkeys((62, 64), _NAME),
    **dict.fromkeys((66, 67, 68), _WEAK),
}
"""The remedy for each verification error of OpenSSL (X509_V_ERR_… in openssl/x509_vfy.h)."""

_OLD_TLS: Final = ("the server supports only old versions of TLS", _OLD)
_OLD_CIPHERS: Final = ("the server supports no cipher that we accept", _OLD)
_NO_TLS: Final = ("the server does not answer with TLS", _PLAIN)
_REASONS: Final = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "HTTP_REQUEST": _NO_TLS,
    "PACKET_LENGTH_TOO_LONG": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "UNSUPPORTED_PROTOCOL": _OLD_TLS,
    "TLSV1_ALERT_PROTOCOL_VERSION": _OLD_TLS,
    "DH_KEY_TOO_SMALL": ("the server's Diffie-Hellman key is too small", _OLD),
    "UNSAFE_LEGACY_RENEGOTIATION_DISABLED": ("the server's renegotiation is not secure", _OLD),
    "WRONG_SIGNATURE_TYPE": ("the server's signature is too weak", _OLD),
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _OLD_CIPHERS,
    "TLSV1_ALERT_INSUFFICIENT_SECURITY": _OLD_CIPHERS,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": ("the server requires a client certificate, which we do not have", _PLAIN),
    "TLSV1_UNRECOGNIZED_NAME": ("the server has no certificate for this host", _NAME),
}
"""What happened, and the remedy, for each reason of OpenSSL (SSL_R_… in openssl/sslerr.h)."""
_UNKNOWN: Final = ("the handshake failed", _PLAIN)

_BROKEN_OFF: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_TEMPORARY: Final = "TLSV1_ALERT_INTERNAL_ERROR"


def cause_of_tls(error: ssl.SSLError) -> str:
    """Why the handshake failed, as a clause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate cannot be trusted: {scrub(error.verify_message).rstrip('.')}"
    return f"{_REASONS.get(error.reason, _UNKNOWN)[0]} ({error.reason or type(error).__name__})"


def tls_fault(provider: str, server: str, error: BaseException | None, *, url: str) -> ProviderFault | None:
    """The provider's fault if the error is a failed handshake that would fail again. `url`: its setting."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, _BROKEN_OFF) or error.reason == _TEMPORARY:
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = _CERTIFICATES.get(error.verify_code, "Replace the server's certificate.")
    else:
        remedy = _REASONS.get(error.reason, _UNKNOWN)[1]
    return ProviderFault(provider, f"TLS with {server} failed: {cause_of_tls(error)}.", remedy=remedy.format(url=url))
