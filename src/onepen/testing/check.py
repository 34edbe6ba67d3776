"""Check database files: `python -m onepen.testing.check chat.db`."""

from ..runtime.testing.check import main

if __name__ == "__main__":
    main()
