"""`python -m everyrank`, which is also what torchrun starts."""

import sys

from everyrank.cli import main

sys.exit(main())
