"""`llmbuild` for tests that run many commands: forked from a process that has imported torch and transformers already.

Importing them takes longer than most of what a command does with a tiny model. `serve_warm` starts that process and
writes an executable `llmbuild` that hands it its arguments, folder, environment, standard streams, and takes back the
exit code. What a command imports when, tests/cli and tests/unit look at in processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CLIENT = """#!{python} -ES
import array, json, os, socket, sys
streams = array.array("i", [0, 1, 2])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    answer = server.recv(16)
sys.exit(int(answer) if answer else 99)
"""


@contextlib.contextmanager
def serve_warm(folder: Path) -> Iterator[Path]:
    """Yield a folder with `llmbuild` in it, for the front of PATH."""
    address = str(folder / "socket")
    command = folder / "bin" / "llmbuild"
    command.parent.mkdir()
    command.write_text(CLIENT.format(python=sys.executable, address=address))
    command.chmod(0o755)
    server = subprocess.Popen([sys.executable, __file__, address], start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not Path(address).exists():
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the process that runs commands did not start")
            time.sleep(0.05)
        yield command.parent
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def main(address: str) -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import llmbuild.builder.build
    import llmbuild.cli.main  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address + ".new")
        listener.listen()
        os.rename(address + ".new", address)
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(client)
            client.close()


def serve(client: socket.socket) -> None:
    """Run one command and end the process."""
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    text = b"".join(iter(lambda: client.recv(1 << 16), b""))
    arguments, directory, environment = json.loads(text)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # New ones: those of the server know what they were once opened on.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["llmbuild", *arguments]
    code = 99
    try:
        from llmbuild.cli.main import entry_point

        entry_point()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        client.sendall(str(code).encode())
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
