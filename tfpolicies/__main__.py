"""Makes `python -m tfpolicies` the same as the command `tfpolicies`."""

import sys

try:
    from tfpolicies.cli import main
except KeyboardInterrupt:  # in the milliseconds before signals are handled
    sys.stderr.write("Interrupted.\n")
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
