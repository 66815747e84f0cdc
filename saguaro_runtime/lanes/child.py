"""A draft process and the pipe to it; it ends with its engine."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

_START = "import sys; from saguaro_runtime.lanes.worker import main; main(int(sys.argv[1]))"
_BROKEN = (EOFError, OSError)


class Lost(Exception):
    """The process has ended or is of no more use; the message says why."""


class Child:
    """A process of the worker's code; it ends when this object does, or the process that holds it.

    It is started by a plain command, so scripts need no `if __name__ == "__main__"`.
    """

    def __init__(
        self, setup: object, *, inherited: Sequence[int], threads: int, timeout_s: float
    ) -> None:
        """`inherited`: file descriptors it keeps; timeout_s: longest wait inside a message."""
        ours, theirs = socket.socketpair()
        # A process that has been stopped neither reads nor completes what it was writing.
        wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, wait)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *inherited),
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": str(threads)},
        )
        theirs.close()
        self._listen(Connection(ours.detach()))
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _stop, self._process, self._connection, 1.0, self._owner)
        self.send(setup)

    def _listen(self, connection: Connection) -> None:
        self._connection = connection
        # Connection.poll makes a selector for every call.
        self._heard = select.poll()
        self._heard.register(connection.fileno(), select.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except _BROKEN:
            with contextlib.suppress(*_BROKEN):
                self.receive(0.0)  # its last message may say why it ended
            raise self._gone() from None

    def receive(self, timeout_s: float) -> Any:
        """Its next message, or None where there is none in time."""
        try:
            if not self._heard.poll(math.ceil(1e3 * timeout_s)):
                return None
            message = self._connection.recv()
        except _BROKEN:
            raise self._gone() from None
        except Exception as error:  # bytes that are no message
            raise Lost(f"the draft process sent garbage ({type(error).__name__})") from error
        if isinstance(message, tuple) and message and message[0] == "error":
            raise Lost(f"the draft process failed:\n{message[1]}")
        return message

    def end(self, *, patience_s: float = 1.0) -> None:
        """Ask it to end, and make it."""
        if self._end.detach():
            _stop(self._process, self._connection, patience_s, self._owner)

    def _gone(self) -> Lost:
        # Its end of the pipe closes a moment before it can be waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        if code is None:
            return Lost("the draft process does not listen")
        return Lost(f"the draft process ended (exit code {code})")


def _stop(
    process: subprocess.Popen[bytes], connection: Connection, patience_s: float, owner: int
) -> None:
    if os.getpid() != owner:  # a fork that ends: the process is its parent's
        connection.close()
        return
    if patience_s:
        with contextlib.suppress(*_BROKEN, pickle.PicklingError):
            connection.send(("close",))
    connection.close()
    try:
        process.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
