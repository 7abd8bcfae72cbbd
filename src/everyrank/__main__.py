"""`python -m everyrank`, which is also what torchrun starts."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.path.realpath(os.curdir)):
    del sys.path[0]  # what `python -m` puts first: the current folder, in which others may have left a torch.py

from everyrank.cli import main

sys.exit(main())
