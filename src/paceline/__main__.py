"""`python -m paceline` is the `paceline` command."""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main())
