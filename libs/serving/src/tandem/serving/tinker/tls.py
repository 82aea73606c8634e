"""TLS by certificate files, which are checked before anything starts."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import msgspec

from tandem.common.errors import ConfigError
from tandem.common.files import irregular
from tandem.common.keys import refuse_others


class TlsCertificate(msgspec.Struct, frozen=True):
    """A certificate, and its private key."""

    certificate: Path
    key: Path


def read_tls(certificate: Path | None, key: Path | None) -> TlsCertificate | None:
    """Return the certificate for HTTPS; None for HTTP. Raises `ConfigError`."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: give both, or neither")
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not path.exists():
            raise ConfigError(f"{option} {path}: there is no such file")
        if (kind := irregular(path)) is not None:
            raise ConfigError(f"{option} {path}: it is {kind}, not a file")
    refuse_others(key, os.stat(key))
    try:
        # A password would be asked for on the console, again and again: none is taken.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # among them those of ssl
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror
        raise ConfigError(
            f"--tls-cert {certificate} --tls-key {key}: cannot use them ({reason}): they must be a certificate and its "
            "private key, as PEM, the key without a password"
        ) from error
    return TlsCertificate(certificate, key)
