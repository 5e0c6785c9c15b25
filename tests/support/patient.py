"""What a test itself asks of an API server that may be busy."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request

_TRIES, _WAIT_SECONDS = 5, 0.5


def answered(request: urllib.request.Request, timeout: float, context: ssl.SSLContext | None = None) -> bytes:
    """The body of the answer. Raises OSError.

    What was refused with 429 has not been done, and a read does no harm twice: such requests are made again, because a
    server on a slow disk refuses one now and then ("etcdserver: leader changed"), one that was away and is back closes
    connections, and its clients go on.
    """
    for further in reversed(range(_TRIES)):
        try:
            with urllib.request.urlopen(request, None, timeout, context=context) as answer:
                return bytes(answer.read())
        except OSError as error:
            code = error.code if isinstance(error, urllib.error.HTTPError) else 0
            passes = code == 429 or (request.get_method() == "GET" and (code >= 500 or code == 0))
            if not passes or not further:
                raise
        time.sleep(_WAIT_SECONDS)
    raise AssertionError("the last try answers or raises")
