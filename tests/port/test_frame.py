"""The start of a port: one seed for all ranks, imports and names of the helper functions."""

from __future__ import annotations

import pytest
from test_idioms import SCRIPT, fact, plan_port

from everyrank.port.source import NotPortedError

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


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("sys.exit(main())", "exit_status = main()\n    dist.destroy_process_group()\n    sys.exit(exit_status)\n"),
        ("raise SystemExit(main())", "exit_status = main()\n    dist.destroy_process_group()\n    raise SystemExit("),
        ("main()", "main()\n    dist.destroy_process_group()\n"),
    ],
)
def test_process_group_is_destroyed_before_the_exit(last: str, expected: str) -> None:
    script = f"{SCRIPT}\n\ndef main():\n    return 0\n\n\nif __name__ == '__main__':\n    {last}\n"
    assert f"'__main__':\n    {expected}" in plan_port(script, "ddp").source.edited()


def test_file_that_is_open_during_the_training_is_opened_by_all_ranks() -> None:
    """If only rank 0 trained, the ranks would wait for each other."""
    script = SCRIPT.replace("train(net,", "with open('log', 'w') as log:\n    train(net,")
    ported_script = plan_port(script, "ddp").source.edited()
    assert "with open('log' if dist.get_rank() == 0 else os.devnull, 'w') as log:\n    train(" in ported_script


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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("split = 8", ["def split_(loader", "train(ddp_net, split_(DataLoader(data, batch_size=4)), opt)"]),
        ("def parts(x, split): pass", ["def split_(loader", ", split_(DataLoader("]),
        ("split = split_ = 8", ["def split__(loader"]),
        (
            "dist = net0.norm(dim=1)",
            ["import torch.distributed as dist_\n", "if dist_.get_rank() != 0", "dist_.all_reduce("],
        ),
        ("def setup(): pass", ["def setup_():", "\nsetup_()\n"]),
        ("from numpy import random", ["\nimport random as random_\n", "    random_.seed(seed)\n"]),
        ("class RankBatches: pass", ["class RankBatches_:", "= RankBatches_(loader.batch_sampler"]),
    ],
)
def test_helpers_get_another_name_if_the_script_uses_theirs(line: str, expected: list[str]) -> None:
    """The line of the script stays as it is."""
    port = plan_port(SCRIPT.replace("net = Net()", f"{line}\nnet = Net()"), "ddp").source.edited()
    for text in (f"\n{line}\n", *expected):
        assert text in port


def test_script_that_imports_the_modules_keeps_their_names() -> None:
    script = "import random\nimport torch.distributed as dist\n" + SCRIPT
    port = plan_port(script, "ddp").source.edited()
    assert "    random.seed(seed)\n" in port
    assert "    dist.all_reduce(sums)\n" in port


@pytest.mark.parametrize("argument", ["sampler=SubsetRandomSampler(some)", "batch_sampler=batches"])
def test_distributed_sampler_does_not_replace_a_custom_sampler(argument: str) -> None:
    """The port would also train on the samples that the sampler leaves out, such as those of the validation."""
    script = SCRIPT.replace("batch_size=4", argument)
    sampler = argument.partition("(")[0].partition("=")[2] if "(" in argument else "RandomSampler"
    with pytest.raises(NotPortedError, match="--sampler torch would read all"):
        plan_port(script, "ddp", sampler="torch", loader={"sampler": sampler})
