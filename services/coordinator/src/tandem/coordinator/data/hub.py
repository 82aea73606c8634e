"""Ask once whether the Hugging Face Hub can be reached, for its library would ask six times."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

_TIMEOUT_S = 5.0


def why_unreachable() -> str:
    """Return what is in the way of the Hub, or of the mirror that ``HF_ENDPOINT`` names; empty if it answers.

    Also empty where the user has forbidden to ask (``HF_HUB_OFFLINE``): then the library says so.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return ""
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # any answer is an answer
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return ""  # it is there; the library may know certificates that Python does not
        reason = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        return f"{constants.ENDPOINT} cannot be reached ({reason or error.reason})"
    except (OSError, http.client.HTTPException) as error:
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return ""


@contextlib.contextmanager
def only_the_cache() -> Iterator[None]:
    """Let the libraries look for data sets only among what they have downloaded before."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
