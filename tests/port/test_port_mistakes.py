"""A port with one wrong or missing edit is reported. The correct port is not."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import pytest

from everyrank.port import audit_port, check_ported, port_script
from everyrank.rerun import ScriptHost
from scripts_to_port import FUNCTIONS_SCRIPT

pytestmark = pytest.mark.integration

# Each case has code of the correct port, wrong code, and the text that the check or the audit reports.
MISTAKES = {
    "loss of a rank's own samples": ("        loss = mean_over_ranks(loss, len(targets))\n", "", "one rank's samples"),
    "weight of a full batch": ("mean_over_ranks(loss, len(targets))", "mean_over_ranks(loss, 16)", "the loss is"),
    "no wrapper in training": ("train(ddp_net, loader", "train(net, loader", "not averaged"),
    "wrapper of nothing": (
        "return torch.nn.parallel.DistributedDataParallel(model)",
        "return model",
        "not averaged",
    ),
    "loss not multiplied by the ranks": ("(count * dist.get_world_size() / sums[1])", "(count / sums[1])", "0.3333"),
    "loss shown is a rank's own": ("    dist.all_reduce(sums)\n    share", "    share", "the loss is"),
    "training batches not split": (
        "split(DataLoader(TensorDataset(x, y)",
        "(DataLoader(TensorDataset(x, y)",
        "the loss is",
    ),
    "order of its own on each rank": (
        ".manual_seed(shared_seed())",
        ".manual_seed(torch.initial_seed())",
        "the loss is",
    ),
    "rest of a batch left out": (
        "batch[dist.get_rank() :: dist.get_world_size()]",
        "batch[dist.get_rank() :: dist.get_world_size()][: len(batch) // dist.get_world_size()]",
        "the loss is",
    ),
    "last batch left out": ("batch_size=16, shuffle=True", "batch_size=16, shuffle=True, drop_last=True", "loss is"),
    "learning rate scaled by the ranks": ("lr=0.01)", "lr=0.01 * dist.get_world_size())", "learning rates"),
    "clipped by a part of the norm": ("0.5)\n", "0.5 / dist.get_world_size())\n", "gradients"),
    "gradients kept": ("        optimizer.zero_grad()\n", "", "gradients"),
    "count of a rank's own": ("seen += add_over_ranks(len(inputs))", "seen += len(inputs)", "printed"),
    "weight of a rank's own": ("loss.item() * add_over_ranks(len(inputs))", "loss.item() * len(inputs)", "printed"),
    "evaluation not added up": ("    right = add_over_ranks(right)\n", "", "printed"),
    "evaluation added up, not split": (
        "split(DataLoader(TensorDataset(x[:33], y[:33]), batch_size=8), evaluates=True)",
        "DataLoader(TensorDataset(x[:33], y[:33]), batch_size=8)",
        "printed",
    ),
    "evaluation padded": (", evaluates=True)", ")", "printed"),
    "every rank saves": (
        "    if dist.get_rank() == 0:\n        torch.save",
        "    if True:\n        torch.save",
        "net.pt",
    ),
    "no rank 0 saves": ("== 0:\n        torch.save", "== 1:\n        torch.save", "does not save net.pt"),
    "keys of the wrapper": ("torch.save(net.state_dict()", "torch.save(ddp_net.state_dict()", "other keys"),
    "every rank prints": ('        sys.stdout = open(os.devnull, "w")', "        pass", "prints on each rank"),
    "one dropout mask for all": ("    own_noise()\n    loader", "    loader", "dropout masks are equal"),
    "no process group": (
        'if "RANK" in os.environ:\n        dist.init_process_group()',
        'if "RANK" in os.environ:\n        pass',
        "fails",
    ),
}


# A port of a script with dropout that differs is compared a second time without dropout.
WITH_DROPOUT = {
    *("one dropout mask for all", "loss of a rank's own samples"),
    *("training batches not split", "order of its own on each rank"),  # no mistakes without random numbers
}
# BatchNorm1d fails with one sample. On the CPU its statistics are local to a rank.
SCRIPT = FUNCTIONS_SCRIPT.replace("nn.BatchNorm1d(8), ", "")


@contextlib.contextmanager
def host_and_port(folder: Path, script_text: str) -> Generator[tuple[ScriptHost, str]]:
    """Yield the host of a script, and the text of its correct port."""
    script = folder / "train.py"
    script.write_text(script_text)
    port = port_script([str(script)], (3,), 120.0).best.text
    with ScriptHost([str(script)], timeout_seconds=60.0) as host:
        yield host, port


@pytest.fixture(scope="module")
def correct_port(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[ScriptHost, str]]:
    """Yield the host and the correct port of a script without dropout."""
    assert SCRIPT.count("nn.Dropout(0.2), ") == 1
    with host_and_port(tmp_path_factory.mktemp("mistakes"), SCRIPT.replace("nn.Dropout(0.2), ", "")) as host_with_port:
        yield host_with_port


@pytest.fixture(scope="module")
def correct_port_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[ScriptHost, str]]:
    """Yield the host and the correct port of a script with dropout."""
    with host_and_port(tmp_path_factory.mktemp("dropout"), SCRIPT) as host_with_port:
        yield host_with_port


def check_port(host: ScriptHost, port_text: str) -> str:
    """Return all that `everyrank port --check` reports about a port."""
    port_path = Path(host.python_args[0]).with_name("train_ddp.py")
    port_path.write_text(port_text)
    result = check_ported(host, port_path, (3,))
    best = result.best
    lines = [item.difference for item in best.comparisons] + best.doubts
    lines += [f"printed: {printed_line}" for _, printed_line in best.differing_lines]
    if any(lines):
        return "\n".join(lines)
    return "\n".join(item.text for item in audit_port(host.python_args, result.files, best, 60.0))


@pytest.mark.parametrize("fixture", ["correct_port", "correct_port_with_dropout"])
def test_correct_port_has_no_report(request: pytest.FixtureRequest, fixture: str) -> None:
    """The script has dropout in one of the two cases."""
    assert check_port(*request.getfixturevalue(fixture)).strip() == ""


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_port_is_reported(request: pytest.FixtureRequest, name: str) -> None:
    """The report contains the expected text."""
    host, port_text = request.getfixturevalue("correct_port_with_dropout" if name in WITH_DROPOUT else "correct_port")
    correct_code, wrong_code, expected = MISTAKES[name]
    assert correct_code in port_text, port_text
    assert expected in check_port(host, port_text.replace(correct_code, wrong_code))
