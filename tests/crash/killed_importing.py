"""A process that imports a file and kills itself when so much of it is done.

Run as `python -m tests.crash.killed_importing DATABASE FILE UNITS`: killed by SIGKILL before the
unit of this number is posted, or, with -1, not at all.
"""

import os
import signal
import sys
from pathlib import Path

from onepen.actors.writer import WriterRef
from onepen.runtime.cli.database import write
from onepen.runtime.transfer import import_file
from onepen.storage.transfer import ImportReport
from onepen.storage.units import Unit


def main(database: str, file: str, units: int) -> None:
    left = units
    commit = WriterRef.commit

    async def counted(self: WriterRef, unit: Unit) -> object:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return await commit(self, unit)

    WriterRef.commit = counted  # type: ignore[method-assign, assignment]

    async def run(writer: WriterRef) -> ImportReport:
        return await import_file(writer, file)

    write(Path(database), run, create=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
