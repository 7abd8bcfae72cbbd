"""The start of a port: one seed for all ranks, imports and names of the helper functions."""

from __future__ import annotations

import pytest
from test_idioms import SCRIPT, fact, plan_port

SEED = "torch.manual_seed(0)"


def ported(lines: str, before_seed: str = "", imports: str = "") -> str:
    """Return the port of a script that sets torch's seed, with these lines before its model."""
    script = imports + SCRIPT.replace("net = Net()", f"{before_seed}{SEED}\n{lines}net = Net()")
    plan = plan_port(script, "ddp", first_facts=[fact(script, "seed", SEED, library="torch")])
    return plan.source.edited()


@pytest.mark.parametrize(
    ("imports", "line"),
    [
        ("from sklearn.model_selection import train_test_split\n", "a, b = train_test_split(data)\n"),
        ("import pandas as pd\n", "table = pd.read_csv(path)\nrest = table.sample(frac=0.5)\n"),
        ("import numpy as np\n", "weight = np.random.beta(1, 1)\n"),
        ("from numpy.random import beta\n", "weight = beta(1, 1)\n"),
    ],
)
def test_numbers_that_numpy_draws_for_other_libraries_are_equal_on_all_ranks(imports: str, line: str) -> None:
    """A split of the data by another seed on each rank would train on validation samples."""
    port = ported(line, imports=imports)
    assert "\nsame_seed()\n" in port
    assert "    np.random.seed(seed)\n" in port
    assert "import numpy as np\n" in port


def test_seeded_script_keeps_its_seed() -> None:
    assert "same_seed" not in ported("x = np.mean(y)\nrng = np.random.default_rng(0)\n", imports="import numpy as np\n")


def test_split_before_the_seed_is_equal_on_all_ranks() -> None:
    split = "a, b = torch.utils.data.random_split(data, [4, 2])\n"
    assert "\nsame_seed()\n" in ported("", before_seed=split)
    assert "same_seed" not in ported(split)


def test_numpy_generator_without_a_seed_has_a_note() -> None:
    """It draws its seed from the operating system."""
    script = "import numpy as np\nimport sklearn\n" + SCRIPT.replace(
        "net = Net()", "rng = np.random.default_rng()\nnet = Net()"
    )
    assert any("default_rng(seed)" in sentence for _, sentence in plan_port(script, "ddp").notes)
