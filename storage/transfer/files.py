"""Files of exports: written whole or not at all, read line by line with every length bounded.

Keeps: a file appears under its name when all of it is on disk, with mode 0600, and nothing is
overwritten unless that was asked for; a file is what it was when it was first looked at. The
temporary name is the process's own and begins with a dot.
"""

from __future__ import annotations

import gzip
import itertools
import os
import stat
import zlib
from contextlib import contextmanager
from hashlib import sha256
from typing import IO, TYPE_CHECKING, Any, final

from ..errors import ExportError, ImportFileError
from .format import encoded

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from .format import Line
    from .limits import ImportLimits

_BUFFER_BYTES = 256 * 1024
_numbers = itertools.count(1)


@final
class Output:
    """Lines on their way out, counted and digested."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = sha256()
        self.bytes_written = 0

    def line(self, line: Line) -> None:
        data = encoded(line)
        self._stream.write(data)
        self._digest.update(data)
        self.bytes_written += len(data)

    @property
    def sha256(self) -> str:
        """Of all that was written so far."""
        return self._digest.hexdigest()


# Writing -------------------------------------------------------------------------------------


def _looks_like_a_database(path: str) -> bool:
    """Told by what lies beside it: a database that this process has open must not be opened."""
    if path.endswith(("-wal", "-shm", "-journal", ".lock")):
        return True
    return any(os.path.lexists(path + end) for end in ("-wal", "-shm", ".lock"))


@contextmanager
def written_file(path: str | os.PathLike[str], *, overwrite: bool = False) -> Generator[Output]:
    """A new file, there under its name when the block has ended without an error.

    Packed if its name ends in `.gz`. Blocks; raises `ExportError`.
    """
    target = os.path.abspath(os.fsdecode(path))
    folder, name = os.path.split(target)
    if os.path.lexists(target):
        if not overwrite:
            hint = "choose another name, or say that it may be overwritten"
            raise ExportError(target, "there is such a file already", hint=hint)
        if not os.path.isfile(target) or _looks_like_a_database(target):
            hint = "choose another name"
            raise ExportError(target, "it is not a file to be overwritten", hint=hint)
    temporary = os.path.join(folder, f".{name[:200]}.{os.getpid()}-{next(_numbers)}.partial")
    try:
        with _opened(temporary) as file:
            if name.endswith(".gz"):
                # Nothing of this machine or moment: equal content, equal bytes.
                packed = gzip.GzipFile("", "wb", 6, fileobj=file, mtime=0)
                with packed:
                    yield Output(packed)  # type: ignore[arg-type] # it is a binary stream
            else:
                yield Output(file)
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(temporary, target, overwrite=overwrite)
    except OSError as error:
        hint = "look at the folder, its permissions and its free space"
        raise ExportError(target, error.strerror or str(error), hint=hint) from error
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)


def _opened(temporary: str) -> IO[bytes]:
    if os.path.lexists(temporary):  # of a process that had our number and died
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(temporary, flags, 0o600), "wb", _BUFFER_BYTES)


def _put_in_place(temporary: str, target: str, *, overwrite: bool) -> None:
    if overwrite:
        os.replace(temporary, target)
    else:
        # Unlike a rename, a link never takes the place of what came there meanwhile.
        os.link(temporary, target)
        os.unlink(temporary)
    folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def output_to(stream: IO[bytes]) -> Output:
    """A stream that is somebody else's: it is flushed and closed there."""
    return Output(stream)


# Reading -------------------------------------------------------------------------------------


@final
class Source:
    """A file that is imported, read several times from its beginning or from a place in it."""

    def __init__(self, path: str, file: IO[bytes], limits: ImportLimits) -> None:
        self.path = path
        self.limits = limits
        self._file = file
        self._state = self._looked_at()
        self._packed = file.read(2) == b"\x1f\x8b"
        self._unpacked: Any = None

    @property
    def size_bytes(self) -> int:
        """Of the file as it lies there, packed or not."""
        return self._state[2]

    @property
    def position(self) -> int:
        """How much of `size_bytes` was read."""
        return self._file.tell()

    def _looked_at(self) -> tuple[int, int, int, int]:
        found = os.fstat(self._file.fileno())
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def check_unchanged(self) -> None:
        """Raise if somebody has written to the file since it was opened."""
        if self._looked_at() != self._state:
            raise self.error(0, "it has changed while it was read", "import it again")

    def error(self, line: int, problem: str, hint: str) -> ImportFileError:
        return ImportFileError(self.path, line, problem, hint=hint)

    def lines(self, offset: int = 0, number: int = 1) -> Iterator[tuple[int, int, bytes]]:
        """Line numbers, where each begins, and the lines, from a place on."""
        limits = self.limits
        try:
            stream = self._stream_at(offset)
            while True:
                line: bytes = stream.readline(limits.line_bytes_max + 1)
                if not line:
                    return
                if len(line) > limits.line_bytes_max:
                    problem = f"it is longer than {limits.line_bytes_max} bytes"
                    hint = "it is no export, or the limit is too low: line_bytes_max"
                    raise self.error(number, problem, hint)
                if not line.endswith(b"\n"):
                    hint = "copy the file again, or export again"
                    raise self.error(number, "the file breaks off in it", hint)
                yield number, offset, line
                number += 1
                offset += len(line)
                if offset > limits.total_bytes_max:
                    problem = f"there are more than {limits.total_bytes_max} bytes"
                    raise self.error(number, problem, "raise total_bytes_max if that is meant")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = f"it can't be unpacked: {error}"
            raise self.error(number, problem, "copy the file again, or export again") from error
        except OSError as error:
            hint = "look at the file and the disk"
            raise self.error(number, error.strerror or str(error), hint) from error

    def _stream_at(self, offset: int) -> IO[bytes]:
        if not self._packed:
            self._file.seek(offset)
            return self._file
        if self._unpacked is None:
            self._file.seek(0)
            self._unpacked = gzip.GzipFile(fileobj=self._file, mode="rb")
        self._unpacked.seek(offset)
        stream: IO[bytes] = self._unpacked
        return stream

    def close(self) -> None:
        self._file.close()


def open_source(path: str | os.PathLike[str], limits: ImportLimits) -> Source:
    """A file to be imported. Blocks; raises `ImportFileError`."""
    name = os.fsdecode(path)
    try:
        # Not waiting for somebody to write into what is a pipe.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        hint = "check the path and its permissions"
        raise ImportFileError(name, 0, error.strerror or str(error), hint=hint) from error
    file = os.fdopen(descriptor, "rb", _BUFFER_BYTES)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        hint = "it is read more than once: save it to a file first"
        raise ImportFileError(name, 0, "it is not a regular file", hint=hint)
    return Source(name, file, limits)
