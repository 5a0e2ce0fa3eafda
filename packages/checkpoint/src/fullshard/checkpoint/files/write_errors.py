"""The text of an error of the file system during a write: the place, the cause, what to do.

torch's zip writer raises "unexpected pos 704 vs 598" after a write that failed, and an error of a
file descriptor names no file. ``write_error`` finds the system's error, and words it.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

__all__ = ["write_error"]

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_error(error: BaseException, path: Path, needed: int = 0) -> BaseException:
    """Return the system's error behind ``error``, with a text of its own.

    An ``OSError`` whose text is not the system's has one already, and is returned as it is. The
    same is true for an ``error`` without a system's error behind it.

    Args:
        error: what a write raised.
        path: the file or folder to name if the system's error names none.
        needed: bytes of all that is to be written; 0: not known.
    """
    found = _system_error(error)
    if found is None or found.errno is None or found.strerror != os.strerror(found.errno):
        return error if found is None else found
    named = found.filename2 or found.filename
    where = Path(os.fsdecode(named)) if isinstance(named, str | bytes | os.PathLike) else path
    told = OSError(found.errno, _text(found.errno, where, needed))
    told.__cause__ = error
    return told


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that ``error`` hides, if it is one of torch's writer."""
    while isinstance(error, OSError | RuntimeError):
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _text(code: int, where: Path, needed: int) -> str:
    facts = [f"{needed} bytes are to be written"] if needed else []
    cure = ""
    if code == errno.ENOSPC:
        facts.append(_free(where))
        cure = ". Free some space, or write elsewhere"
    elif code == errno.EDQUOT:
        cure = ". Remove files of this user, or write elsewhere"
    elif code == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            facts.append(f"the limit of a file (ulimit -f) is {limit} bytes")
        cure = ". Raise the limit, or write elsewhere"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        cure = ". Pass a folder in which this user may write"
    elif code in (errno.EEXIST, errno.ENOTDIR):
        cure = ". Pass a folder: a file has this name, or the name of a folder above"
    elif code == errno.EISDIR:
        cure = ". A folder has the name of a file: remove it, or write elsewhere"
    told = ", and ".join(facts)
    return f"{os.strerror(code)}: {where}{': ' if told else ''}{told}{cure}"


def _free(path: Path) -> str:
    """Return what is free on the file system of ``path``, or of the first folder above it."""
    for each in (path, *path.absolute().parents):
        try:
            system = os.statvfs(each)
        except OSError:
            continue
        return f"{system.f_bavail * system.f_frsize} bytes and {system.f_favail} files are free"
    return "its file system cannot be read"
