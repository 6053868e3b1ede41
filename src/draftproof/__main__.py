"""`python -m draftproof`."""

import sys

from draftproof.cli import main

sys.exit(main())
