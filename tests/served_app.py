"""An ASGI application on 127.0.0.1, served from a thread of this process."""

from __future__ import annotations

import socket
import threading
from typing import Any, Self

import uvicorn


class ServedApp:
    """The server, a context manager; requests to its `url` wait from the beginning."""

    def __init__(self, app: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        quiet: Any = {"log_level": "error", "http": "h11", "ws": "none"}
        config = uvicorn.Config(app, timeout_graceful_shutdown=1, **quiet)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends it; its address then refuses connections."""
        self._server.should_exit = True
        self._thread.join()
