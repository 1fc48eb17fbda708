"""What the services' user may read, what others may write, and whether this user may install:
looked at before anything is written.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path
from typing import Final

from ollama_tiering.errors import UsageError
from ollama_tiering.systemd.trust import foreign

HOMES: Final = (Path("/home"), Path("/root"), Path("/run/user"))  # what ProtectHome= hides


def require_reachable(account: pwd.struct_passwd, *paths: Path, cure: str) -> None:
    """UsageError if the user may not read one of them."""
    groups = set(os.getgrouplist(account.pw_name, account.pw_gid))
    for path in paths:
        for step in (*reversed(path.parents), path):
            if not _may(account.pw_uid, groups, step):
                raise UsageError(
                    f"user {account.pw_name} may not read {step}, which the service needs",
                    hint=f"{cure}; or use --run-as or --user",
                )


def _may(uid: int, groups: set[int], path: Path) -> bool:
    info = path.stat()
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() or os.access(path, os.X_OK) else 0)
    if path.is_dir():
        wanted = stat.S_IXOTH
    shift = 6 if info.st_uid == uid else 3 if info.st_gid in groups else 0
    return uid == 0 or info.st_mode & (wanted << shift) == wanted << shift


def require_own(account: pwd.struct_passwd, *folders: Path) -> None:
    """UsageError if another user than this one and root could change what the service would run."""
    for folder in folders:
        if step := foreign(folder, (0, account.pw_uid)):
            raise UsageError(
                f"another user than {account.pw_name} and root may change {step}, and so choose "
                "what the service runs",
                hint=f"chown root {step}; chmod go-w {step}; or use --run-as or --user",
            )


def why_changeable(account: pwd.struct_passwd, *folders: Path) -> str:
    """What of these, or on the way to them, another user than this one and root may change, and
    the cure; empty if there is nothing, or it cannot be looked at.
    """
    for folder in folders:
        with contextlib.suppress(OSError):
            if step := foreign(folder, (0, account.pw_uid)):
                return (
                    f"another user than {account.pw_name} and root may change {step}, and so "
                    f"choose what the services run: put {folder} where only root may write"
                )
    return ""


def require_writable(*places: Path) -> None:
    """UsageError if this user may not write to one of them, or make it."""
    for place in places:
        here = next(step for step in (place, *place.parents) if step.exists())
        if not os.access(here, os.W_OK):
            raise UsageError(
                f"this user may not write to {here}",
                hint="run it with sudo, or with --user for yourself",
            )
