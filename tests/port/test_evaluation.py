"""Counts of the training loop are those of all ranks. Those of an evaluation are counted once."""

from __future__ import annotations

import pytest
from test_idioms import SCRIPT, fact, plan_port

LOOP = """\
        if i % 100 == 0:
            for vx, vy in val_loader:
                correct += (model(vx).argmax(1) == vy).sum().item()
        seen += (logits.argmax(1) == y).sum().item()
"""


def ported_loop(lines: str, backward: str = "        (loss / 2).backward()\n") -> str:
    """Return the port of a script with these lines before the backward in its loop."""
    script = SCRIPT.replace("        (loss / 2).backward()\n", lines + backward).replace("if i % 2:", "while i % 2:")
    return plan_port(script, "ddp").source.edited()


def test_evaluation_in_the_training_loop_is_counted_once() -> None:
    """Each rank evaluates all samples, so that a sum over the ranks would be too large."""
    port = ported_loop(LOOP)
    assert "                correct += (model(vx).argmax(1) == vy).sum().item()\n" in port
    assert "        seen += add_over_ranks((logits.argmax(1) == y).sum().item())\n" in port


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("right += torch.sum(logits == y)", "right += add_over_ranks(torch.sum(logits == y))"),
        ("right += np.sum(logits == y)", "right += add_over_ranks(np.sum(logits == y))"),
        ("right = right + (logits == y).sum()", "right = right + add_over_ranks((logits == y).sum())"),
        ("right = len(y) + right", "right = add_over_ranks(len(y)) + right"),
        ("total += loss.item() * len(y)", "total += loss.item() * add_over_ranks(len(y))"),
        ("share = (logits == y).float().mean()", "share = mean_over_ranks((logits == y).float().mean(), len(y))"),
        (
            "share = torch.mean(logits.eq(y).float())",
            "share = mean_over_ranks(torch.mean(logits.eq(y).float()), len(y))",
        ),
        ("share = logits.mean().item()", "share = mean_over_ranks(logits.mean(), len(y)).item()"),
        ("norm += torch.sum(logits)", "norm += torch.sum(logits)"),
        ("part = (loss_of(logits, y) * (y == 0)).mean()", "part = (loss_of(logits, y) * (y == 0)).mean()"),
    ],
)
def test_counts_and_means_of_the_training_loop_are_those_of_all_ranks(line: str, expected: str) -> None:
    assert f"        {expected}\n" in ported_loop(f"        {line}\n")


def test_loss_of_a_loop_for_training_and_validation_is_summed() -> None:
    """Only the loss of training batches is the mean over all ranks."""
    backward = "        total += loss.item() * y.size(0)\n        if phase == 'train':\n            loss.backward()\n"
    assert "        total += add_over_ranks(loss.item() * y.size(0))\n" in ported_loop("", backward)


def test_validation_in_the_training_loop_reads_the_part_of_each_rank() -> None:
    """Its counts are summed over the ranks, like those of the training batches."""
    loader = "DataLoader(held_out, batch_size=4)"
    script = SCRIPT.replace("net.eval()", f"train(net, {loader}, opt)")
    facts = [fact(script, "loader", loader, id=7), fact(script, "pass", "enumerate(loader)", id=7)]
    assert f"train(net, split({loader}), opt)" in plan_port(script, "ddp", *facts).source.edited()


SUM = "right += (net(vx).argmax(1) == vy).sum().item()\n"
TABLE = "table[net(vx).argmax(1), vy] += 1\n"


@pytest.mark.parametrize(
    ("loops", "num_reached", "is_split"),
    [
        ([("enumerate(held)", SUM)], 1, True),
        ([("enumerate(held)", SUM), ("tqdm(held)", SUM)], 2, True),
        ([("enumerate(held)", SUM), ("tqdm(held)", TABLE)], 2, False),
        ([("enumerate(held)", SUM), ("tqdm(held)", TABLE)], 1, False),  # a part that the run has not reached
        ([("enumerate(held)", SUM), ("range(2)", "print(next(iter(held)))\n")], 2, False),
        ([("enumerate(held)", SUM), ("enumerate(other)", TABLE)], 1, True),
    ],
)
def test_loader_is_split_only_if_all_its_loops_keep_sums(
    loops: list[tuple[str, str]], num_reached: int, is_split: bool
) -> None:
    """Otherwise a table of all samples would be that of one rank's samples."""
    made = "DataLoader(held_out, batch_size=4)"
    script = SCRIPT + f"held = {made}\n" + "".join(f"for vx, vy in {read}:\n    {line}" for read, line in loops)
    facts = [fact(script, "loader", made, id=7)]
    for read, line in loops[:num_reached]:
        read_call = "iter(held)" if "iter(" in line else read
        facts.append(fact(script, "pass", read_call, id=7, trains=False))
    ported_script = plan_port(script, "ddp", *facts).source.edited()
    assert (f"held = split({made}, evaluates=True)" in ported_script) is is_split
    assert ported_script.count("right = add_over_ranks(right)") == is_split * sum(line == SUM for _, line in loops)


def test_loop_over_two_loaders_is_split_only_if_both_are() -> None:
    """A function evaluates two loaders, and one of them is also read by a loop that needs all samples."""
    loaders = [f"DataLoader(held_out, batch_size={size})" for size in (5, 6)]
    script = SCRIPT.replace(
        "def count(", f"def check(held):\n    for vx, vy in enumerate(held):\n        {SUM}\n\ndef count("
    )
    script += f"first = {loaders[0]}\nsecond = {loaders[1]}\nfor vx, vy in tqdm(second):\n    {TABLE}"
    script += "check(first)\ncheck(second)\n"
    facts = [fact(script, "loader", call, id=number) for number, call in enumerate(loaders, 7)]
    facts += [
        fact(script, "pass", "tqdm(second)", id=8, trains=False),
        fact(script, "pass", "enumerate(held)", "check(first)", id=7, trains=False),
        fact(script, "pass", "enumerate(held)", "check(second)", id=8, trains=False),
    ]
    ported_script = plan_port(script, "ddp", *facts).source.edited()
    assert "evaluates=True" not in ported_script.partition("net = Net()")[2]
    assert "add_over_ranks" not in ported_script


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("noise = torch.randn(size, 8)", "noise = torch.randn(len(x), 8)"),
        ("logits = logits.view(size * 2, -1)", "logits = logits.view(len(x) * 2, -1)"),
        ("logits = logits.view(size * steps, -1)", "logits = logits.view(len(x) * steps, -1)"),
        ("noise += torch.randn(size)", "noise += torch.randn(len(x))"),
        ("first = logits[:size]", "first = logits[:len(x)]"),
        ("total += loss.item() * size", "total += loss.item() * size"),
        ("current = i * size + 1", "current = i * size + 1"),
        ("print(i * size, f'{size}')", "print(i * size, f'{size}')"),
        ("bar.update(size)", "bar.update(size)"),
    ],
)
def test_batch_size_is_that_of_a_rank_only_in_sizes_of_tensors(line: str, expected: str) -> None:
    assert f"        {expected}\n" in port_with_size("enumerate(loader)", "x", f"        {line}\n")


@pytest.mark.parametrize(
    "loop", ["tqdm(enumerate(loader))", "enumerate(tqdm(loader))", "tqdm(enumerate(loader), total=8)"]
)
def test_counter_of_a_loop_with_a_progress_bar_is_not_the_batch(loop: str) -> None:
    assert "torch.zeros(len(x))" in port_with_size(loop, "x", "        zeros = torch.zeros(size)\n")


def test_size_of_a_batch_in_a_dictionary_is_that_of_its_first_tensor() -> None:
    lines = "        x, y = batch['image'], batch['label']\n        zeros = torch.zeros(size)\n"
    assert "torch.zeros(len(batch['image']))" in port_with_size("enumerate(loader)", "batch", lines)


def port_with_size(loop: str, batch: str, lines: str) -> str:
    """Return the port of a script whose loader has the batch size `size`, with these lines in its loop."""
    target = "(x, y)" if batch == "x" else batch
    script = SCRIPT.replace("batch_size=4", "batch_size=size").replace(
        "(x, y) in enumerate(loader):", f"{target} in {loop}:"
    )
    script = script.replace("        logits = model", f"{lines}        logits = model")
    return plan_port(script, "ddp").source.edited()
