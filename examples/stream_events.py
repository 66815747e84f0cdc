"""Server-sent events from an engine, with the standard library alone.

    python examples/stream_events.py TARGET DRAFT
    curl -N "http://127.0.0.1:8008/?prompt=Once+upon+a+time"

One request at a time: `saguaro serve` batches them and speaks the OpenAI protocol.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from saguaro_runtime import Engine, SamplingParams


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """Answers GET /?prompt=... with an event per piece of text, and one that ends the stream."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            prompt = parse_qs(urlparse(self.path).query).get("prompt", [""])[0]
            if not prompt:
                self.send_error(400, "want ?prompt=...")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            # A client that hangs up raises here; leaving the loop cancels its request.
            for piece in engine.stream(prompt, SamplingParams(max_new_tokens=64)):
                self.event({"text": piece})
            self.event({"done": True})

        def event(self, data: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    return Handler


def main(target: str, draft: str, port: str = "8008") -> None:
    with Engine(target, draft) as engine:
        server = HTTPServer(("127.0.0.1", int(port)), handler(engine))
        print(f"http://127.0.0.1:{server.server_port}/?prompt=Once+upon+a+time")
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(__doc__) if len(sys.argv) < 3 else main(*sys.argv[1:])
