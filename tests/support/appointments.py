"""A model of the part of the status receiver that tells agents which node leads."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from free_port import free_port

LEFT = json.dumps({"application": 3, "infrastructure": 100, "stall": 10, "inARow": 0, "chargedInARow": 0})


class Appointments(ThreadingHTTPServer):
    """HTTP server that tells agents which node leads."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answer, self.answered = b"{}", 0

    @property
    def env(self) -> dict[str, str]:
        return {"DDPJOB_STATUS_URL": f"http://127.0.0.1:{self.server_address[1]}/v1/progress"}

    def appoint(self, term: int, place: int, port: str = "", **left: int) -> None:
        leader = {"term": term, "place": place, "host": "127.0.0.1", "port": int(port or free_port())}
        self.answer = json.dumps(leader | {"left": json.loads(LEFT) | left}).encode()


class _Answer(BaseHTTPRequestHandler):
    server: Appointments

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v1/leader" else 404)
        self.end_headers()
        self.wfile.write(self.server.answer)
        self.server.answered += 1

    def log_message(self, *_: object) -> None:
        pass
