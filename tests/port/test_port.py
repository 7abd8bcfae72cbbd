"""`everyrank port` on complete scripts: ports are equivalent, wrong ports are detected, other scripts are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.port import NotPortedError, PortResult, check_ported, port_script
from everyrank.rerun import ScriptHost
from scripts_to_port import (
    AUGMENTATION_SCRIPT,
    CARRIED_STATE_SCRIPT,
    CARRIED_STATE_WITH_LOADER_SCRIPT,
    CROSS_VALIDATION_SCRIPT,
    ENGINE_MODULE,
    FIT_FUNCTION_SCRIPT,
    FUNCTIONS_SCRIPT,
    GAN_SCRIPT,
    GENERATOR_SCRIPT,
    GPT_SCRIPT,
    IMPORTS_AND_DATA,
    INDEX_SCRIPT,
    LOSS_IN_FORWARD_SCRIPT,
    MANUAL_UPDATE_SCRIPT,
    NO_LOADER_SCRIPT,
    OUTPUT_FILES_SCRIPT,
    SCRIPT_WITH_ENGINE,
    SLICE_SCRIPT,
    SUBSET_SAMPLER_SCRIPT,
    SUMMED_LOSS_SCRIPT,
    TRAINER_CLASS_SCRIPT,
)

pytestmark = pytest.mark.integration

STYLES = {
    "functions": FUNCTIONS_SCRIPT,
    "one_function": FIT_FUNCTION_SCRIPT,
    "class": TRAINER_CLASS_SCRIPT,
    "no_loader": NO_LOADER_SCRIPT,
    "index": INDEX_SCRIPT,
    "slice": SLICE_SCRIPT,
    "generator": GENERATOR_SCRIPT,
    "summed": SUMMED_LOSS_SCRIPT,
    "folds": CROSS_VALIDATION_SCRIPT,
    "gan": GAN_SCRIPT,
    "by_hand": MANUAL_UPDATE_SCRIPT,
    "loss_in_forward": LOSS_IN_FORWARD_SCRIPT,
    "carried": CARRIED_STATE_SCRIPT,
    "carried_from_loader": CARRIED_STATE_WITH_LOADER_SCRIPT,
    "subsets": SUBSET_SAMPLER_SCRIPT,
}


def port_script_text(folder: Path, script_text: str, ranks: tuple[int, ...] = (2, 3)) -> PortResult:
    """Return the port of this script, and check that porting changes no file."""
    script = folder / "train.py"
    script.write_text(script_text)
    result = port_script([str(script)], ranks, 120.0)
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert script.read_text() == script_text
    return result


@pytest.mark.parametrize("style", STYLES)
def test_port_is_equivalent(tmp_path: Path, style: str) -> None:
    """The port trains the same model, prints the same lines, and keeps most lines of the script."""
    result = port_script_text(tmp_path, STYLES[style])
    assert result.best.is_equal, [comparison.difference for comparison in result.best.comparisons]
    assert not result.best.differing_lines
    assert result.float64
    assert "everyrank" not in result.best.text
    removed_lines = [
        line for line in STYLES[style].splitlines() if line.strip() and line.strip() not in result.best.text
    ]
    assert len(removed_lines) <= 12


def test_files_are_written_by_rank_0_only(tmp_path: Path) -> None:
    """Only rank 0 writes. Other ranks write to the null device or wait."""
    best = port_script_text(tmp_path, OUTPUT_FILES_SCRIPT, (2,)).best
    assert best.is_equal
    assert not best.differing_lines
    assert not best.doubts
    for expected_line in (
        'if "RANK" not in os.environ:\n    os.environ["CUDA_VISIBLE_DEVICES"] = "0"\n',
        'torch.device("cuda" if torch.cuda.is_available() else "cpu")',
        'log = open("train.log" if dist.get_rank() == 0 else os.devnull, "w")',
        'with open("page.txt" if dist.get_rank() == 0 else os.devnull, "w") as page:\n    rows',
        'if dist.get_rank() == 0:\n    with open("weights.txt", "wb") as file:\n        torch.save(',
        'dist.barrier()\nwith open("weights.txt", "rb") as file:\n',
    ):
        assert expected_line in best.text
    assert [sentence for _, sentence in best.notes] == ["the output has only rank 0's part of inputs"]


def test_each_rank_has_its_own_augmentation(tmp_path: Path) -> None:
    """Each rank has its own random numbers for augmentation and dropout."""
    best = port_script_text(tmp_path, AUGMENTATION_SCRIPT, (2,)).best
    assert best.is_equal, best.comparisons
    assert (
        "        random.seed(torch.initial_seed())\n        np.random.seed(torch.initial_seed() % 2**32)\n" in best.text
    )
    assert "ddp_net = parallel(net)\n    own_noise()\n" in best.text
    # The loop's own random numbers have to be equal on all ranks: they may decide about a step.
    script_with_random_steps = AUGMENTATION_SCRIPT.replace(
        "        opt.step()\n", "        if random.random() < 0.9:\n            opt.step()\n"
    )
    best = port_script_text(tmp_path, script_with_random_steps, (2,)).best
    assert best.is_equal, best.comparisons
    assert "        torch.manual_seed(torch.initial_seed() + dist.get_rank())\n        np.random.seed(" in best.text


def test_training_loop_in_another_file_is_ported(tmp_path: Path) -> None:
    """Without --with it is refused. With it both files are ported."""
    script, engine = tmp_path / "train.py", tmp_path / "engine.py"
    script.write_text(SCRIPT_WITH_ENGINE)
    engine.write_text(ENGINE_MODULE)
    with pytest.raises(NotPortedError, match="--with"):
        port_script([str(script)], (2,), 120.0)
    result = port_script([str(script)], (3,), 120.0, other=engine)
    assert result.best.is_equal, [comparison.difference for comparison in result.best.comparisons]
    assert not result.best.differing_lines
    assert "import engine_ddp as engine" in result.best.text
    assert "def setup()" in result.best.other_text
    assert "def setup()" not in result.best.text
    # Forked scripts write bytecode: Python reads the variable that forbids it only when it starts.
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"engine.py", "train.py"}


def test_port_to_fsdp_is_equivalent(tmp_path: Path) -> None:
    """A port without the weights of the ranks' losses is detected."""
    script = tmp_path / "train.py"
    script.write_text(GPT_SCRIPT)
    result = port_script([str(script)], (2, 3), 120.0, target="fsdp")
    best = result.best
    assert best.is_equal, [comparison.difference for comparison in best.comparisons]
    assert not best.differing_lines
    assert not best.doubts  # one checkpoint, with the keys of the original checkpoint
    assert "shard(model, *model.blocks)" in best.text
    assert "own_noise" not in best.text  # training draws no random numbers
    # Without the weight of each rank's loss the gradient is different.
    wrong_port = best.text.replace("loss = mean_over_ranks(loss, len(batch))", "pass")
    assert wrong_port != best.text
    (tmp_path / "wrong.py").write_text(wrong_port)
    with ScriptHost([str(script)]) as host:
        assert not check_ported(host, tmp_path / "wrong.py", (2,)).best.is_equal


CONTRASTIVE = SUMMED_LOSS_SCRIPT.replace(
    "loss = ((recon - batch) ** 2).sum() + 0.1 * recon.abs().sum()",
    "loss = F.cross_entropy(recon @ batch.T, torch.arange(len(batch)))",
)


def test_contrastive_loss_is_refused(tmp_path: Path) -> None:
    """A contrastive loss compares samples of a batch. The error names the line of the loss."""
    script_text = CONTRASTIVE.replace("recon @ batch.T", "recon @ recon.T")
    with pytest.raises(NotPortedError, match="compares samples of a batch") as error:
        port_script_text(tmp_path, script_text, (2,))
    assert "cross_entropy(recon @ recon.T" in script_text.splitlines()[error.value.line - 1]


def test_contrastive_loss_in_a_module_is_refused(tmp_path: Path) -> None:
    """The module has a parameter, as in CLIP, so the script calls two modules: the model and the loss."""
    script_text = CONTRASTIVE.replace(
        "loss = F.cross_entropy(recon @ batch.T, torch.arange(len(batch)))", "loss = contrast(recon)"
    ).replace(
        "optimizer =",
        "class Contrast(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.scale = nn.Parameter(torch.ones(()))\n\n"
        "    def forward(self, z):\n        return F.cross_entropy(self.scale * z @ z.T, torch.arange(len(z)))\n\n\n"
        "contrast = Contrast()\noptimizer =",
    )
    with pytest.raises(NotPortedError, match="compares samples of a batch") as error:
        port_script_text(tmp_path, script_text, (2,))
    assert "cross_entropy(self.scale" in script_text.splitlines()[error.value.line - 1]


def test_contrastive_loss_with_inputs_is_not_equivalent(tmp_path: Path) -> None:
    """The outputs are compared with the inputs of all samples. Only the check detects this."""
    result = port_script_text(tmp_path, CONTRASTIVE, (2,))
    assert not result.best.is_equal
    assert "update 0" in result.best.comparisons[-1].difference


@pytest.mark.parametrize(
    ("script_text", "line", "reason"),
    [
        (IMPORTS_AND_DATA + "import torch.distributed as dist\ndist.init_process_group('gloo')\n", 11, "audit"),
        (
            IMPORTS_AND_DATA
            + "class Stream(torch.utils.data.IterableDataset):\n"
            + "    def __iter__(self):\n        return iter(zip(x, y))\n\n"
            + "m = nn.Linear(6, 2)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            + "for a, b in DataLoader(Stream(), batch_size=8):\n"
            + "    F.cross_entropy(m(a), b).backward()\n    o.step()\n",
            16,
            "stream",
        ),
        (IMPORTS_AND_DATA + "print(x.mean())\n", 1, "nothing trains"),
    ],
    ids=["distributed", "stream", "trains-nothing"],
)
def test_unsupported_script_is_refused_with_its_line(tmp_path: Path, script_text: str, line: int, reason: str) -> None:
    """The script is distributed already, has a stream as its data set, or trains nothing."""
    with pytest.raises(NotPortedError, match=reason) as error:
        port_script_text(tmp_path, script_text)
    assert error.value.line == line
