"""`saguaro serve`: an OpenAI-compatible server over one engine. Needs the extra [serve]."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from pathlib import Path

from ..cli import add_engine_options, add_model_options, check_models, engine_config

GRACE_S = 20
"""How long answers may go on after a SIGTERM or Ctrl-C."""

EXAMPLES = """\
  saguaro serve --target ./llama-8b --draft ./llama-1b
  saguaro serve --target ./llama-8b --draft ./llama-1b --port 8001 --max-batch 16
  saguaro serve --target ./llama-8b --draft ./llama-1b --device cuda:0 --draft-device cuda:1
  saguaro serve --target ./llama-8b --draft ./llama-1b --host 0.0.0.0 --api-key @key.txt
  curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
      -d '{"prompt": "Once upon a time", "max_tokens": 32, "stream": true}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    group.add_argument("--name", metavar="NAME", help="of the model; default: the target's")
    group.add_argument(
        "--api-key", metavar="KEY", help="asked of every caller; @FILE reads it from a file"
    )
    group.add_argument("--max-batch", type=int, default=8, help="requests decoded at once")
    group.add_argument("--max-tokens", type=int, default=16384, help="key-value slots together")
    group.add_argument("--max-requests", type=int, default=256, help="most at once, waiting or not")
    group.add_argument(
        "--reproducible",
        action="store_true",
        help="the text of a seed is the same alone and in a batch",
    )
    add_engine_options(parser, k=4, branches=20)


def run(args: argparse.Namespace) -> int:
    check_models(args)
    try:
        import uvicorn

        from .app import create_app
        from .guard import Limits
    except ModuleNotFoundError as error:
        from saguaro_kernels.errors import ConfigError

        raise ConfigError(
            f'serve: {error.name} is not installed; run: pip install "saguaro-ssd[serve]"'
        ) from error
    from ..engine import Engine

    limits = Limits(args.max_requests, api_key=read_key(args.api_key))
    config = engine_config(
        args,
        max_batch=args.max_batch,
        max_tokens=args.max_tokens,
        reproducible=args.reproducible,
    )
    name = args.name or Path(os.path.abspath(args.target)).name
    # The address first: another server may have it.
    with bind(args.host, args.port) as listening:
        print(f"loading {args.target}", file=sys.stderr, flush=True)
        with Engine(args.target, args.draft, config) as engine:
            app = create_app(engine, name, limits)
            if limits.api_key is None and not is_loopback(args.host):
                print(f"{args.host}: anyone who reaches it may ask; see --api-key", file=sys.stderr)
            server = uvicorn.Server(
                uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S)
            )
            host, port = listening.getsockname()[:2]
            print(f"serving {name} at http://{host}:{port}/v1", file=sys.stderr, flush=True)
            server.run([listening])
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet."""
    try:
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        from saguaro_kernels.errors import ConfigError

        raise ConfigError(f"--host {host}, --port {port}: {error}") from error
    return bound


def read_key(given: str | None) -> str | None:
    """The key itself, or the first line of the file after an @."""
    if given is None:
        return None
    key = given
    if given.startswith("@"):
        try:
            key = Path(given[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeError):
            key = ""
    if not key.strip():
        from saguaro_kernels.errors import ConfigError

        raise ConfigError(f"--api-key {given}: want a key, or @ and a file with the key")
    return given if key is given else key.split()[0]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
