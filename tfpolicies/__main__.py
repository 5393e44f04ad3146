"""Makes `python -m tfpolicies` the same as the command `tfpolicies`."""

import sys

from tfpolicies.cli import main

sys.exit(main())
