"""`python -m graphrt` is the `graphrt` command."""

from __future__ import annotations

import sys

from graphrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
