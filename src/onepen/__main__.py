"""`python -m onepen`: the command line, where the `onepen` script is not on the path."""

from .runtime.cli import main

if __name__ == "__main__":
    main(prog_name="onepen")
