"""Requests that a test itself sends to an API server that may be busy."""

import ssl
import time
import urllib.error
import urllib.request

_TRIES, _WAIT_SECONDS = 5, 0.5


def answered(request: urllib.request.Request, timeout: float, context: ssl.SSLContext | None = None) -> bytes:
    """Return the body of the answer. Raise OSError. A request that is refused with 429 is repeated, because it was not
    executed. So is a failed read: a server on a slow disk may refuse it ("etcdserver: leader changed"), and a server
    that was away closes connections."""
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
