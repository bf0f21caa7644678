"""``python -m taskqd`` is the ``taskqd`` command."""

from __future__ import annotations

import sys

from taskqd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
