"""The Ray cluster that a run uses: the one that RAY_ADDRESS names, or one that is this process's own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import Any

import psutil

from cocktail.errors import CocktailError, UsageError
from cocktail.interrupts import check_interrupt, ignored

_REACH_SECONDS = 10.0


@contextmanager
def ray_cluster(*, hides_command: bool) -> Iterator[bool]:
    """Inside, this process is connected to Ray; yields whether the cluster is its own, which then ends with it.

    Its own has no dashboard, sends no statistics and listens on the loopback interface only, to who has its token. On
    standard output Ray says nothing, nor does anybody else meanwhile.

    Args:
        hides_command: the arguments of this process's command must not be seen; Ray notes them.

    Raises:
        UsageError: RAY_ADDRESS cannot be used.
        CocktailError: Ray cannot be started or reached.
    """
    address = os.environ.get("RAY_ADDRESS", "").strip()
    # Ray's own word for a cluster that this process starts.
    address = "" if address == "local" else address
    with ExitStack() as stack:
        if address:
            _check_address(address)
            options: dict[str, Any] = {"address": address}
        else:
            options = _own(stack)
        import ray

        # It prints what becomes of workers.
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        if hides_command:
            ray._raylet.setproctitle("cocktail batch")
        stack.callback(_end, set(psutil.Process().children()))
        try:
            with _own_handler(signal.SIGTERM):
                ray.init(**options, log_to_driver=False, logging_level="CRITICAL")
        except Exception as error:
            # A library that is interrupted may raise anything.
            check_interrupt()
            what, hint = "Ray cannot be started", None
            if address:
                what = f"The Ray cluster that RAY_ADDRESS names ({address}) cannot be used"
                hint = "Start the cluster, or unset RAY_ADDRESS for one on this machine."
            raise CocktailError(f"{what}: {first_line(error)}", hint) from error
        yield not address


def first_line(error: Exception) -> str:
    """The first line of what Ray says."""
    return str(error).strip().partition("\n")[0]


def _own(stack: ExitStack) -> dict[str, Any]:
    """What starts a cluster on this machine; its files go with `stack`."""
    # In a folder of one's own, as what Ray makes there is open to all users; a short one, as paths of sockets must be.
    folder = tempfile.mkdtemp(prefix="cocktail-", dir="/tmp" if os.name == "posix" else None)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    # Ray looks at the first one as it is imported, and its processes inherit them.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # So many processes wait for work from the beginning.
    return {"address": "local", "include_dashboard": False, "num_cpus": 1, "_temp_dir": folder}


def _check_address(address: str) -> None:
    """Returns if something answers there; Ray itself would try for many minutes."""
    if "://" in address:
        raise UsageError(
            f"RAY_ADDRESS is {address}, which is a Ray client's.",
            "Run the command on a machine of the cluster, with the address HOST:PORT of its head, or auto.",
        )
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(
            f"RAY_ADDRESS is {address}, which is no address.", "Give HOST:PORT of the cluster's head, or auto."
        )
    if host:
        try:
            socket.create_connection((host, int(port)), _REACH_SECONDS).close()
        except OSError as error:
            raise CocktailError(
                f"RAY_ADDRESS is {address}, where no cluster answers: {first_line(error)}",
                "Start the cluster, or unset RAY_ADDRESS for one on this machine.",
            ) from error


@contextmanager
def _own_handler(number: signal.Signals) -> Iterator[None]:
    """Inside, Ray may set a handler that exits; a signal that it got is handled as before afterwards."""
    handler = signal.getsignal(number)
    try:
        yield
    except SystemExit:
        signal.signal(number, handler)
        signal.raise_signal(number)
        raise
    finally:
        signal.signal(number, handler)


def _end(before: set[psutil.Process]) -> None:
    """Disconnects, and ends what was started; `before` are the child processes that were there."""
    import ray

    with ignored():
        started = [child for child in psutil.Process().children() if child not in before]
        for child in list(started):
            with suppress(psutil.Error):
                started += child.children(recursive=True)
        ray.shutdown()
        for process in started:
            with suppress(psutil.Error):
                process.kill()
