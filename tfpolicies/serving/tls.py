"""Reads the TLS certificate and key of a server from two files."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tfpolicies.errors import UsageError
from tfpolicies.serving.access import read_secret, warn_if_shared
from tfpolicies.system.paths import resolve_path

_MAX_FILE_BYTES = 1_000_000  # bytes of a file
_NEW_KEY = "openssl pkey -in FILE -out NEW"
_EDWARDS_OID_PREFIX = b"\x06\x03\x2b\x65"  # prefix of the identifiers of Ed25519 and Ed448 in a key


class TlsCredentials(NamedTuple):
    """A certificate and its key.

    Attributes:
        certificate: the server's certificate and the rest of its chain, in PEM.
        key: its private key, in PEM.
        context: both for Python's `ssl`.
    """

    certificate: bytes
    key: bytes
    context: ssl.SSLContext


def read_tls(certificate: Path, key: Path, warn: Callable[[str], object]) -> TlsCredentials:
    """Reads a certificate and its key.

    Args:
        certificate: a file in PEM, with the server's certificate first.
        key: a file in PEM with its private key, which is not encrypted.
        warn: called with a line of text if other users may read the key.
    """
    chain, _ = read_secret("--tls-cert", certificate, _MAX_FILE_BYTES)
    private_key, mode = read_secret("--tls-key", key, _MAX_FILE_BYTES)
    try:
        ssl.create_default_context(cadata=chain.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"--tls-cert {str(certificate)!r} must contain certificates in PEM, which begin with "
            "-----BEGIN CERTIFICATE-----, the server's first."
        ) from error
    if b"ENCRYPTED" in private_key:
        raise UsageError(
            f"--tls-key {str(key)!r} is encrypted, but the server has no password. Give an "
            f"unencrypted key: {_NEW_KEY}."
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(resolve_path(certificate), resolve_path(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"--tls-key {str(key)!r} is not the key of the certificate in "
                f"{str(certificate)!r}. Give the key with which the certificate was made."
            ) from error
        if error.reason is not None and error.reason.endswith(("TOO_SMALL", "TOO_WEAK")):
            raise UsageError(
                f"--tls-cert {str(certificate)!r} is too weak for this computer's OpenSSL: "
                f"{error.reason.lower().replace('_', ' ')}. Make one with an RSA key of 2048 bits "
                "or an ECDSA key (P-256)."
            ) from error
        raise UsageError(
            f"--tls-key {str(key)!r} must contain a private key in PEM, which begins with "
            f"-----BEGIN PRIVATE KEY-----. Convert it: {_NEW_KEY}."
        ) from error
    if _EDWARDS_OID_PREFIX in _decode_pem(private_key)[:20]:
        raise UsageError(
            f"--tls-key {str(key)!r} is an Ed25519 or Ed448 key, which gRPC does not accept. Make "
            "the certificate with an RSA key of 2048 bits or an ECDSA key (P-256)."
        )
    warn_if_shared(key, mode, warn)
    return TlsCredentials(chain, private_key, context)


def _decode_pem(key: bytes) -> bytes:
    """Decodes a private key in PEM; "" for other text."""
    body = key.partition(b"PRIVATE KEY-----")[2]
    return base64.b64decode(body.partition(b"-----END")[0])
