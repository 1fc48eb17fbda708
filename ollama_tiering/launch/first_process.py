"""The first process of a container, as which `tiering up` is started there.

The kernel gives it every orphan, and ends it by no signal for which it has no handler. So another
process does the work, and the first one only passes signals on and reaps what has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Final

_FIRST: Final = 1
_PASSED_ON: Final = {
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
}
_OF_TERMINAL: Final = 0x80  # si_code SI_KERNEL: all in the foreground have it already
_ENDED_BY: Final = 128  # shells and Docker add the signal's number to it


def stand_before() -> None:
    """Returns at once; as process 1 it returns in a second process, and the first one ends when
    that has ended, with its exit code. To be called while there is one thread.
    """
    if os.getpid() != _FIRST:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_stand(worker))


def _stand(worker: int) -> int:
    """The exit code of the worker, once it has ended."""
    while True:
        told = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if told.si_signo == signal.SIGCHLD:
            if (code := _reap(worker)) is not None:
                return code
        elif told.si_code != _OF_TERMINAL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, told.si_signo)


def _reap(worker: int) -> int | None:
    """All that has ended by now; the worker's exit code, if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
                return _ENDED_BY - code if code < 0 else code
    return None
