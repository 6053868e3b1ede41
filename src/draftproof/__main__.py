"""`python -m draftproof`."""

import sys

from draftproof.cli.main import main

sys.exit(main())
