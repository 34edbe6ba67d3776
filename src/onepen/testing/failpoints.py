"""Run a program until a failpoint: `python -m onepen.testing.failpoints POINT PROGRAM …`."""

import sys

from ..runtime.testing.failpoints import main

if __name__ == "__main__":
    main(sys.argv[1:])
