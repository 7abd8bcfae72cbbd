"""The test-suite in two halves that run beside each other: most tests wait for one process, and there are two cores.

`python tests/side_by_side.py -k name` passes its words to both. The first half shows its progress; what the other has
said follows when both have ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

NOTHING_SELECTED = 5  # pytest's exit status
APART = ["tests/parity", "tests/recipes"]  # about half of the seconds


def main() -> int:
    """The worse exit status of the two."""
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as said:
        other = subprocess.Popen([*pytest, *APART], stdout=said, stderr=subprocess.STDOUT)
        try:
            left_out = [word for folder in ("tests/integration", *APART) for word in ("--ignore", folder)]
            status = subprocess.run([*pytest, *left_out], check=False).returncode
            statuses = {status, other.wait()}
        finally:
            other.kill()
        said.seek(0)
        print(said.read(), end="")
    if statuses == {NOTHING_SELECTED}:
        return NOTHING_SELECTED
    return max(statuses - {NOTHING_SELECTED})


if __name__ == "__main__":
    sys.exit(main())
