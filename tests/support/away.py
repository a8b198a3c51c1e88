"""A way to a server of the tests that can be closed: connections are refused, or taken and never answered."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Way:
    """Passes on what comes to `port` while it is open."""

    def __init__(self, target: int) -> None:
        self._target, self.port, self._sockets = target, 0, set[socket.socket]()
        self._is_open = threading.Event()
        self._listen()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._is_open.set()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets |= {client, server}
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                self._is_open.wait()
                sink.sendall(content)
        _shut(source, sink)

    @contextlib.contextmanager
    def away(self, *, silent: bool) -> Iterator[None]:
        """Meanwhile the server is away: nobody listens, or, as behind a broken network, nothing is answered."""
        self._is_open.clear()
        if not silent:
            _shut(self._listener, *self._sockets)
            self._sockets.clear()
        yield
        if silent:
            self._is_open.set()
        else:
            self._listen()


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
