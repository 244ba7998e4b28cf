"""Files between the disks of hosts: each process keeps a folder, puts files into others' and gets files from them.

Plain TCP with the authentication of `multiprocessing.connection` (HMAC of a secret that the processes of a run share);
what is sent is neither encrypted nor executed. It is meant for the network that the gradients travel on.
"""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from io import BytesIO
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import IO

from jaxtrain.errors import first_line
from jaxtrain.files import replacing

Address = tuple[str, int]

_CHUNK = 2**24
_NAME = re.compile(r"\d+/\d+-of-\d+\.npz")
_PUT, _GET, _OK = b"put ", b"get ", b"ok"


class Exchange:
    """Serves `folder` to those who know the secret, until it is closed.

    Args:
        host: this host, as others reach it.
    """

    def __init__(self, folder: Path, host: str, secret: bytes):
        self._folder = folder
        self._secret = secret
        self._listener = Listener(("", 0), backlog=64)
        self.address: Address = (host, self._listener.address[1])
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="checkpoint-exchange", daemon=True)
        self._thread.start()

    def put(self, to: Address, name: str, path: Path) -> None:
        """Copies a file into the folder of another process.

        Raises:
            OSError: it can't be reached, or can't write the file.
        """
        with self._asking(to) as connection, path.open("rb") as file:
            connection.send_bytes(_PUT + name.encode())
            _send(connection, file)
            answer = connection.recv_bytes()
        if answer != _OK:
            raise OSError(answer.decode())

    def get(self, where: Address, name: str) -> BytesIO:
        """A file of the folder of another process.

        Raises:
            OSError: it can't be reached, or has no such file.
        """
        content = BytesIO()
        with self._asking(where) as connection:
            connection.send_bytes(_GET + name.encode())
            answer = connection.recv_bytes()
            if answer != _OK:
                raise OSError(answer.decode())
            _receive(connection, content)
        content.seek(0)
        return content

    def close(self) -> None:
        """Stops to serve."""
        self._closed = True
        with contextlib.suppress(OSError):  # wakes the thread that listens
            socket.create_connection(("localhost", self.address[1])).close()
        self._thread.join()
        self._listener.close()

    @contextlib.contextmanager
    def _asking(self, address: Address) -> Iterator[Connection]:
        try:
            with Client(address, authkey=self._secret) as connection:
                yield connection
        except (EOFError, AuthenticationError) as error:
            raise OSError(f"{address[0]}:{address[1]} hung up: {first_line(error)}") from error

    def _listen(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        # A stranger without the secret, or a process that dies while it calls, ends nothing and holds up nobody.
        with contextlib.suppress(OSError, EOFError, AuthenticationError), connection:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            request = connection.recv_bytes(maxlength=200)
            name = request[len(_PUT) :].decode(errors="replace")
            if not _NAME.fullmatch(name):
                connection.send_bytes(b"no such name")
            elif request.startswith(_PUT):
                self._take(connection, self._folder / name)
            elif request.startswith(_GET):
                self._give(connection, self._folder / name)

    def _take(self, connection: Connection, path: Path) -> None:
        try:
            with replacing(path) as file:
                _receive(connection, file)
        except OSError as error:
            connection.send_bytes(f"{path}: {error.strerror or error}".encode())
        else:
            connection.send_bytes(_OK)

    def _give(self, connection: Connection, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError as error:
            connection.send_bytes(f"{path}: {error.strerror or error}".encode())
            return
        with file:
            connection.send_bytes(_OK)
            _send(connection, file)


def _send(connection: Connection, file: IO[bytes]) -> None:
    while chunk := file.read(_CHUNK):
        connection.send_bytes(chunk)
    connection.send_bytes(b"")


def _receive(connection: Connection, file: IO[bytes]) -> None:
    while chunk := connection.recv_bytes():
        file.write(chunk)
