"""`everyrank port --to workload`: the workload trains like the script. Unsupported scripts are refused."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from everyrank.cli import main
from everyrank.commands.port_workload import verify_file
from everyrank.port import NotPortedError, WorkloadResult, port_to_workload
from everyrank.port.source import ScriptSource
from everyrank.port.to_workload.definitions import _chooses_imports
from everyrank.port.to_workload.importable import is_importable
from everyrank.port.to_workload.workload_file import _undivided
from scripts_to_port import (
    CARRIED_STATE_WITH_LOADER_SCRIPT,
    CROSS_VALIDATION_SCRIPT,
    FIT_FUNCTION_SCRIPT,
    GAN_SCRIPT,
    IMPORTS_AND_DATA,
    LOSS_IN_FORWARD_SCRIPT,
    MANUAL_UPDATE_SCRIPT,
    NO_LOADER_SCRIPT,
    SUMMED_LOSS_SCRIPT,
    TRAINER_CLASS_SCRIPT,
)

SCRIPT_WITH_MAIN = """import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


def points(length):
    x = torch.randn(length, 6)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(args, model, loader, optimizer, device):
    model.train()
    for batch, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()


def test(model, loader, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            correct += (model(x).argmax(1) == y).sum().item()
    print(correct / len(loader.dataset))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = points(110)
    train_set, test_set = random_split(data, [80, 30])
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=10)
    model = Net(width=8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, device)
        test(model, test_loader, device)
        scheduler.step()


if __name__ == "__main__":
    main()
"""

# The model is built from a field of its data set.
RATINGS = """import torch
from torch.utils.data import DataLoader, Dataset


class Ratings(Dataset):
    def __init__(self, n):
        self.items = torch.randint(7, (n, 2))
        self.targets = (self.items.sum(1) > 6).float()
        self.field_dims = [7, 7]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index], self.targets[index]


class FM(torch.nn.Module):
    def __init__(self, field_dims, width=4):
        super().__init__()
        self.embed = torch.nn.ModuleList([torch.nn.Embedding(n, width) for n in field_dims])

    def forward(self, x):
        return torch.sigmoid((self.embed[0](x[:, 0]) * self.embed[1](x[:, 1])).sum(1))


def get_model(name, dataset):
    if name == "fm":
        return FM(dataset.field_dims)
    raise ValueError(name)


def train(model, optimizer, data_loader, criterion, device):
    model.train()
    for i, (fields, target) in enumerate(data_loader):
        fields, target = fields.to(device), target.to(device)
        y = model(fields)
        loss = criterion(y, target.float())
        model.zero_grad()
        loss.backward()
        optimizer.step()


def test(model, data_loader, device):
    model.eval()
    total = 0
    with torch.no_grad():
        for fields, target in data_loader:
            y = model(fields.to(device))
            total += ((y > 0.5) == target.to(device)).sum().item()
    return total / len(data_loader.dataset)


def main(name, epoch, device):
    device = torch.device(device)
    dataset = Ratings(200)
    train_length = int(len(dataset) * 0.8)
    valid_length = len(dataset) - train_length
    train_dataset, valid_dataset = torch.utils.data.random_split(dataset, (train_length, valid_length))
    train_data_loader = DataLoader(train_dataset, batch_size=32, num_workers=0)
    valid_data_loader = DataLoader(valid_dataset, batch_size=32, num_workers=0)
    model = get_model(name, dataset).to(device)
    criterion = torch.nn.BCELoss()
    optimizer = torch.optim.Adam(params=model.parameters(), lr=0.01, weight_decay=1e-6)
    for epoch_i in range(epoch):
        train(model, optimizer, train_data_loader, criterion, device)
        print(test(model, valid_data_loader, device))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", default="fm")
    parser.add_argument("--epoch", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    main(args.model_name, args.epoch, args.device)
"""

PER_UPDATE = (
    IMPORTS_AND_DATA
    + """
epochs = 2
model = nn.Linear(6, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for epoch in range(epochs):
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs.view(-1, 6)), targets) / 2
        loss.backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
"""
)


def port_text_to_workload(
    folder: Path, script_text: str, *args: str, verify: Callable[[Path], str] = lambda _: ""
) -> WorkloadResult:
    """Return the workload for this script, and check that porting changes no file."""
    script = folder / "train.py"
    script.write_text(script_text)
    result = port_to_workload([str(script), *args], folder / "train_workload.py", 120.0, verify)
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert script.read_text() == script_text
    return result


def test_workload_imports_functions_of_the_script(tmp_path: Path) -> None:
    """The workload imports the model and the data set from the script."""
    result = port_text_to_workload(tmp_path, SCRIPT_WITH_MAIN, "--lr", "0.2")
    assert result.comparison.is_equal, result.difference
    assert result.float64
    assert not result.without_dropout
    for expected_line in (
        "from train import Net, points",
        "args = Namespace(lr=0.2, epochs=3, clip=0.5)",
        "@functools.cache",
        "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),",
        "return F.cross_entropy(output, y) * len(y), len(y)",
        "clip_norm=args.clip",
        "epochs=args.epochs",
        "drop_last=True",
        "seed=5",
        'metrics={"accuracy": accuracy}',
        "EachEpoch(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), 5)",
    ):
        assert expected_line in result.text, result.text


def test_script_without_main_guard_is_copied_into_the_workload(tmp_path: Path) -> None:
    """An import would run the training, so the code is copied."""
    result = port_text_to_workload(tmp_path, PER_UPDATE)
    assert result.comparison.is_equal, result.difference
    assert "from train import" not in result.text
    for expected_line in (
        "return inputs.view(-1, 6), targets",
        "criterion = nn.CrossEntropyLoss(label_smoothing=0.1)",
        "global_batch=2 * 8",
        "return criterion(output, targets) * len(targets), len(targets)",
        "epochs=epochs",
    ):
        assert expected_line in result.text, result.text


# `loss` and `data` are also names of functions of a workload's file. The classes are below the function that uses them.
NAMES_AND_ORDER = """from __future__ import annotations

import os; import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
sys.path += [os.path.join(ROOT, "models")]
import torch; from torch.utils.data import DataLoader, Dataset

try:
    from everyrank_missing import nn
except ImportError:
    print("without everyrank_missing")
    from torch import nn


def main():
    torch.manual_seed(1)
    data = Points()
    model = net = nn.Linear(*data.shape)
    loss = Loss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(DataLoader(data, 8)):
        value=loss(model(x),y) / len(y)
        value.backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class Points(Dataset):
    shape = [6, 3]

    def __len__(self):
        return 48

    def __getitem__(self, index) -> tuple[torch.Tensor, int]:
        return torch.arange(6) * index / 48.0, index % 3


class Loss(nn.Module):
    def like(self) -> Loss:
        return self

    def forward(self, output, target):
        return -output.log_softmax(1)[torch.arange(len(target)), target].sum()


main()
"""


def test_names_imports_and_order_of_a_script_are_kept(tmp_path: Path) -> None:
    """The file finds all names when it is imported, and no function of it replaces a name of the script."""
    result = port_text_to_workload(tmp_path, NAMES_AND_ORDER)
    assert result.comparison.is_equal, result.difference
    for expected_code in (
        "from __future__ import annotations\nimport functools\nimport os\nimport sys\nROOT = os.path.dirname",
        "import torch\nfrom torch.utils.data import Dataset\n",
        "except ImportError:\n    print(",
        "    data = data_for_workload()[1]\n",
        "loss = Loss()\n",
        "def loss_for_workload(output, y):\n    value=loss(output,y) / len(y)\n    return value * 2 * len(y), len(y)\n",
        "optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),",
    ):
        assert expected_code in result.text, result.text


SEVERAL_NAMES = (
    IMPORTS_AND_DATA
    + """
model = net = nn.Linear(6, 2)
biases = [model.bias]
optimizer = opt = torch.optim.SGD([{"params": net.weight}, {"params": biases}], lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=8):
    loss=total=F.cross_entropy(net(inputs),targets)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
"""
)


def test_model_and_optimizer_with_several_names_are_ported(tmp_path: Path) -> None:
    """The optimizer gets the parameters of its argument, and the file quotes the arguments of the command."""
    result = port_text_to_workload(tmp_path, SEVERAL_NAMES, r"\x", '"""')
    assert result.comparison.is_equal, result.difference
    for expected_code in (
        "def build_optimizer(net):\n    model = net\n    biases = [model.bias]\n    return torch.optim.SGD(",
        "schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),",
        "    loss=total=F.cross_entropy(output,targets)\n    return loss * len(targets), len(targets)\n",
        r"train.py '\\x' '\"\"\"'",
    ):
        assert expected_code in result.text, result.text


@pytest.mark.parametrize(
    ("after", "value", "expected"),
    [
        (["loss = f(out, y) / 2"], "loss", (["loss = f(out, y)"], "loss", 1)),
        (["loss = f(out, y)", "loss /= steps"], "loss", (["loss = f(out, y)"], "loss", 1)),
        (["loss = f(out, y)", "loss = loss / args.steps"], "loss", (["loss = f(out, y)"], "loss", 1)),
        (["loss = f(out, y)"], "loss / 2", (["loss = f(out, y)"], "loss", 1)),
        (["loss = f(out, y) / len(y)"], "loss", (["loss = f(out, y) / len(y)"], "loss", 2)),
        (["loss = f(out, y) / len(y)"], "loss / 2", (["loss = f(out, y) / len(y)"], "loss", 1)),
        (["loss = f(out, y) / 4"], "loss", (["loss = f(out, y) / 4"], "loss", 2)),
        (
            ["loss = f(out, y) / 2", "loss = loss + g(y)"],
            "loss",
            (["loss = f(out, y) / 2", "loss = loss + g(y)"], "loss", 2),
        ),
        (["loss = total = f(out, y) / 2"], "loss", (["loss = total = f(out, y) / 2"], "loss", 2)),
    ],
)
def test_only_a_division_by_the_backward_passes_is_removed(
    after: list[str], value: str, expected: tuple[list[str], str, int]
) -> None:
    """Each update has two backward passes. The loss is multiplied by 2 if it is not divided by 2 at the end."""
    values = {"steps": ["literal", "2", 0], "args": ["namespace", "", 1], "args.steps": ["literal", "2", 0]}
    file = SimpleNamespace(
        training=SimpleNamespace(loss=SimpleNamespace(after=after, value=value), backwards=2),
        script=SimpleNamespace(module_values={}),
        backward=SimpleNamespace(chain=[SimpleNamespace(values=values)]),
    )
    assert _undivided(file) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ("width = 8", True),
        ("args = get_args()", False),
        ("args: object = get_args()", False),
        ("width = outer()", False),
        ("class Config:\n    lr = get_args().lr", False),
        ("class Config(get_args().base):\n    pass", False),
        ("def train(args=get_args()):\n    pass", False),
        ("def train():\n    return get_args()", True),
        ("parser: object = argparse.ArgumentParser()", False),
        ("path = sys.argv[1]", False),
    ],
)
def test_script_that_parses_arguments_when_imported_is_copied(statements: str, expected: bool) -> None:
    """Also if a function of the script parses them."""
    text = f"""import argparse
import sys


def get_args():
    return argparse.ArgumentParser().parse_known_args()[0]


def outer():
    return get_args().width


{statements}

if __name__ == "__main__":
    main()
"""
    assert is_importable(ScriptSource(text), Path("train.py"), []) is expected


@pytest.mark.parametrize(("line", "expected"), [(2, True), (3, False), (5, True)])
def test_training_between_two_guards_runs_when_imported(line: int, expected: bool) -> None:
    text = 'if __name__ == "__main__":\n    prepare()\nresult = train()\nif __name__ == "__main__":\n    report()\n'
    event = SimpleNamespace(kind="backward", chain=[SimpleNamespace(span=(line, 0, line, 9))])
    assert is_importable(ScriptSource(text), Path("train.py"), [event]) is expected  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("try:\n    import a as x\nexcept ImportError:\n    import b as x", True),
        ("try:\n    import x\n    has_x = True\nexcept ImportError:\n    print('no x')\n    x = None", True),
        ("if sys.version_info >= (3, 11):\n    import tomllib\nelse:\n    import tomli as tomllib", True),
        ("try:\n    import x\n    main()\nexcept ImportError:\n    pass", False),
        ("if fast:\n    import x\nelse:\n    main()", False),
        ("if fast:\n    import x\n    model = x.Net()", False),
        ("try:\n    size = 3\nexcept ImportError:\n    pass", False),
    ],
)
def test_only_blocks_that_choose_imports_are_copied_whole(text: str, expected: bool) -> None:
    """Blocks that do more are not: the file of a workload must not start a training."""
    assert _chooses_imports(ast.parse(text).body[0]) is expected


CLOSURE = (
    IMPORTS_AND_DATA
    + """
model = nn.Linear(6, 2)
optimizer = torch.optim.LBFGS(model.parameters())
for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=43):

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
"""
)
LOSS_FROM_LAST_BATCH = PER_UPDATE.replace("loader = ", "past = 0.0\nloader = ").replace(
    " / 2\n", " / 2 + past\n        past = 0.1 * loss.detach()\n"
)


@pytest.mark.parametrize(
    ("script_text", "line", "reason"),
    [
        (GAN_SCRIPT, "optG = ", "a second optimizer"),
        (MANUAL_UPDATE_SCRIPT, "loss.backward()", "no torch optimizer"),
        (NO_LOADER_SCRIPT, "loss.backward()", "TensorDataset"),
        (CARRIED_STATE_WITH_LOADER_SCRIPT, "for (steps,) in DataLoader", "a new loader in each epoch"),
        (LOSS_FROM_LAST_BATCH, "loss = criterion", "carried from batch to batch"),
        (CROSS_VALIDATION_SCRIPT, "opt = ", "trains several times"),
        (
            PER_UPDATE.replace("model(inputs.view(-1, 6))", "model(inputs + torch.randn(len(inputs), 6))"),
            "loss = criterion",
            "random numbers",
        ),
        (CLOSURE, "optimizer = ", "LBFGS"),
        (TRAINER_CLASS_SCRIPT, "loss.backward()", "a method"),
        (
            PER_UPDATE.replace(
                "epoch in range(epochs):", "epoch in range(epochs):\n    loader.dataset.tensors[0].mul_(0.9)"
            ),
            "loader.dataset.tensors[0].mul_(0.9)",
            "changes the data set in each epoch",
        ),
        (
            PER_UPDATE.replace("targets) / 2", "targets) + model.weight.norm()"),
            "loss.backward()",
            "reads the model itself",
        ),
        (PER_UPDATE.replace("/ 2\n", "/ (1 + i)\n"), "loss = criterion", "the number of an epoch or batch"),
        (PER_UPDATE.replace("epochs", "workload"), "workload = 2", "use a different name"),
        (
            PER_UPDATE.replace("optimizer = ", "box = argparse.ArgumentParser()\nbox.net = model\noptimizer = ")
            .replace("AdamW(model", "AdamW(box.net")
            .replace("import torch\n", "import argparse\nimport torch\n", 1),
            "optimizer = ",
            "write model for box.net",
        ),
    ],
)
def test_unsupported_script_is_refused_with_its_line(tmp_path: Path, script_text: str, line: str, reason: str) -> None:
    """A workload has one optimizer, one data set and a loss per batch."""
    with pytest.raises(NotPortedError) as error:
        port_text_to_workload(tmp_path, script_text)
    assert reason in str(error.value)
    assert line in script_text.splitlines()[error.value.line - 1]


# Text of {before} is above the loop over epochs, of {epoch} in it, of {batch} in the loop over batches, and of {after}
# below that loop.
LOOPS = (
    IMPORTS_AND_DATA.replace("import torch\n", "import argparse\nimport torch\n", 1)
    + """
args = argparse.Namespace(beta=0.1, clip=1.0)
class Annealer:
    beta = 0.1
    def step(self):
        self.beta *= 0.9
    def __call__(self, x):
        return self.beta * x
annealer, state, step, beta = Annealer(), {"step": 1}, 1, 0.1
model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
def weighted(x):
    return x * step
def weight():
    return float(model[0].bias.sum())
def train(e, options, annealing):
    part = min(1.0, e / 10)
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets) * {factor}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
def main():
    global step
    for epoch in range(6):
        {line}
        train(epoch, args, annealer)
        step += 1
if __name__ == "__main__":
    main()
"""
)


def loops(factor: str, line: str = "pass") -> str:
    """Return a script with this factor of the loss, and this line in its loop over epochs."""
    return LOOPS.replace("{factor}", factor).replace("{line}", line)


@pytest.mark.parametrize(
    ("script_text", "line", "reason"),
    [
        (loops("part"), "loss = ", "`part` may change during the training"),
        (loops("(1 if e < 5 else 2)"), "loss = ", "`e` may change during the training"),
        (loops("step"), "loss = ", "`step` may change during the training"),
        (loops("weighted(1)"), "step += 1", "`step` may change during the training"),
        (loops("options.beta", "args.beta = 1 / (1 + epoch)"), "loss = ", "`options.beta` may change during"),
        (loops("annealing(1)", "annealer.step()"), "loss = ", "`annealing` may change during the training"),
        (
            loops("beta", "beta = args.beta; args.beta = beta / 2")
            .replace("(epoch, args", "(epoch, beta")
            .replace("e, options", "e, beta"),
            "loss = ",
            "`beta` may change during the training",
        ),
        (
            loops("rate").replace("    part = ", "    rate = annealing.beta; annealer.step(); part = "),
            "loss = ",
            "`rate` may change during the training",
        ),
        (loops("state['step']", "state['step'] += 1"), "loss = ", "`state` may change during the training"),
        (
            loops("beta", "global beta; beta = weight()"),
            "loss = ",
            "`beta` may change during the training",
        ),
        (
            loops("1\n        if e >= 5:\n            loss = loss + inputs.mean()"),
            "loss = F.cross_entropy",
            "`e` may change during the training",
        ),
        (
            loops("1", "model[0].requires_grad_(epoch > 3)"),
            "requires_grad_",
            "the training freezes or unfreezes parameters",
        ),
        (loops("1", "model.scale = epoch"), "model.scale = epoch", "the training changes the model, model.scale"),
        (
            loops("1").replace(
                "        optimizer.step",
                "        nn.utils.clip_grad_norm_(model.parameters(), part)\n        optimizer.step",
            ),
            "clip_grad_norm_",
            "`part` may change during the training",
        ),
    ],
)
def test_value_that_changes_during_the_training_is_refused(
    tmp_path: Path, script_text: str, line: str, reason: str
) -> None:
    """The file of a workload would have the value of the first update, in the whole training."""
    with pytest.raises(NotPortedError) as error:
        port_text_to_workload(tmp_path, script_text)
    assert reason in str(error.value)
    assert line in script_text.splitlines()[error.value.line - 1]


LINES_LEFT_OUT = (
    IMPORTS_AND_DATA
    + """
n, best, is_short = 6, 1e9, False
model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
for name, parameter in model[0].named_parameters():
    if "weight" in name:
        parameter.requires_grad = False
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(0, n, 2):
    scale = model[0].out_features / len(loader)
    total = 0.0
    for i, (inputs, targets) in enumerate(loader):
        if is_short and i > 3:
            break
        if is_short and epoch < 5:
            inputs = inputs / 2
        if len(inputs) < 2:
            continue  # no batch
        output = model(inputs)
        loss = F.cross_entropy(output, targets) * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if i > 1000:
            break  # the epoch
        if i % 5:
            continue
        print(total)
    if total > 1e9:
        break  # the training
    if epoch > 100:
        F.mse_loss(model(x), x).backward()
"""
)


def test_lines_that_a_workload_does_not_have_are_noted(tmp_path: Path) -> None:
    """Frozen parameters are in the file, a false part of a condition decides it, and the step of a range counts."""
    result = port_text_to_workload(tmp_path, LINES_LEFT_OUT)
    assert result.comparison.is_equal, result.difference
    for expected_code in ("parameter.requires_grad = False", "epochs=3,", "cross_entropy(output, targets) * scale"):
        assert expected_code in result.text, result.text
    lines = LINES_LEFT_OUT.splitlines()
    assert [(lines[line - 1].strip(), sentence.partition(";")[0]) for line, sentence in result.notes] == [
        ("continue  # no batch", "`continue` skips batches"),
        ("break  # the epoch", "`break` may end an epoch early"),
        ("break  # the training", "`break` may end the training early"),
        ("F.mse_loss(model(x), x).backward()", "this backward did not run in the compared updates"),
    ]


def test_masked_reduction_of_a_loss_is_detected(tmp_path: Path) -> None:
    """The loss is the mean over the targets that are not masked."""
    result = port_text_to_workload(tmp_path, LOSS_IN_FORWARD_SCRIPT)
    assert result.comparison.is_equal, result.difference
    assert result.choice.reduction == "masked"


def test_another_reduction_is_tried_if_verify_reports_a_difference(tmp_path: Path) -> None:
    """The first workload is not equivalent on two ranks. The next one has a loss with the reduction sum."""

    def verify(file: Path) -> str:
        return "" if "first_row" in file.read_text() else "DIFFERENT: update 0, loss"

    assert port_text_to_workload(tmp_path, SUMMED_LOSS_SCRIPT, verify=verify).choice.reduction == "sum"


def test_evaluation_that_differs_is_left_out(tmp_path: Path) -> None:
    """A note reports it. The training is still equivalent."""

    def verify(file: Path) -> str:
        return "DIFFERENT: evaluation, accuracy" if "eval_data" in file.read_text() else ""

    result = port_text_to_workload(tmp_path, SCRIPT_WITH_MAIN, verify=verify)
    assert result.is_equal
    assert "eval_data" not in result.text
    assert "accuracy" not in result.text
    assert "the evaluation is left out" in result.notes[0][1]


def test_workload_that_fails_verify_is_not_equivalent(tmp_path: Path) -> None:
    """The script and the workload are equal on one rank. The difference on two ranks is reported."""
    result = port_text_to_workload(
        tmp_path, FIT_FUNCTION_SCRIPT, verify=lambda _: "DIFFERENT: update 2, tensor layers.0.weight"
    )
    assert not result.is_equal
    assert "tensor layers.0.weight" in result.difference
    assert "\nnet = " not in result.text  # a function creates the model


def test_changed_workload_is_not_equivalent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison detects a change in each part of a workload."""
    from everyrank.port.to_workload import workload

    changes = {
        "lr=0.05": "lr=0.06",
        "1 / (1 + step)": "1 / (2 + step)",
        "label_smoothing=0.1": "label_smoothing=0.2",
        "randn(86, 6)": "randn(86, 6) + 1",
        "nn.Linear(6, 2)": "nn.Linear(6, 2, bias=False)",
    }
    original_workload_text = workload.workload_text
    for correct_code, wrong_code in changes.items():

        def changed_workload_text(
            *args: object, _correct_code: str = correct_code, _wrong_code: str = wrong_code
        ) -> str:
            generated_text = original_workload_text(*args)  # type: ignore[arg-type]
            assert _correct_code in generated_text
            return generated_text.replace(_correct_code, _wrong_code)

        monkeypatch.setattr(workload, "workload_text", changed_workload_text)
        result = port_text_to_workload(tmp_path, PER_UPDATE)
        assert not result.comparison.is_equal, correct_code
        assert result.difference


def test_model_that_depends_on_its_data_set_is_ported(tmp_path: Path) -> None:
    """The workload builds the model from the data set of the script."""
    result = port_text_to_workload(tmp_path, RATINGS, "--model_name", "fm")
    assert result.comparison.is_equal, result.difference
    assert "    return train_dataset, valid_dataset, dataset\n" in result.text
    assert "    dataset = data()[2]\n    model = get_model(name, dataset)\n" in result.text
    assert "criterion(y, target.to(y.dtype))" in result.text  # verify computes in float64
    assert "in order; everyrank shuffles" in result.notes[0][1]


@pytest.mark.integration
def test_ported_workload_is_verified_and_trains_with_fsdp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command runs `everyrank verify` on the workload."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT_WITH_MAIN)
    assert main(["port", "--to", "workload", "train.py"]) == 0
    assert "verify: equal on 2 ranks under ddp" in capfd.readouterr().out
    assert main(["train", "train_workload.py", "--layout", "fsdp", "--processes", "2"]) == 0
    assert "15 updates" in capfd.readouterr().out


@pytest.mark.integration
def test_summed_loss_is_equivalent_on_two_ranks(tmp_path: Path) -> None:
    """The loss is a sum over the samples of a batch."""
    result = port_text_to_workload(tmp_path, SUMMED_LOSS_SCRIPT, verify=verify_file)
    assert result.is_equal, result.difference
    assert result.choice.reduction == "sum"
