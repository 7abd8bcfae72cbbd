"""Findings name the line to change. It is found backwards through assignments, conditions, calls and options."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.audit import Finding
from everyrank.audit.data_flow import read_source
from everyrank.audit.likely_lines import likely_lines

# kind of finding, script; <seen> marks the line of the finding, <change> the line to change
SCRIPTS = {
    "an option of the command line decides the mesh": (
        "gradient.weights",
        """
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--shard-size", type=int, default=1)  # <change>
args = parser.parse_args()
mesh = init_device_mesh("cpu", (world // args.shard_size, args.shard_size))
model = FSDP(net, device_mesh=mesh)
optimizer = SGD(model.parameters())
for x, y in loader:
    loss = f(model(x), y)
    loss.backward()
    optimizer.step()  # <seen>
""",
    ),
    "an argument in a call of several lines": (
        "ranks.rate",
        """
schedule = get_schedule(
    optimizer,
    num_warmup_steps=args.warmup * num_processes,  # <change>
    power=1.0,
)
for x, y in loader:
    loss(x, y).backward()
    optimizer.step()  # <seen>
    schedule.step()
""",
    ),
    "the condition of no_sync": (
        "gradient.weights",
        """
for i, (x, y) in enumerate(loader):
    is_last = i % every == 0  # <change>
    with nullcontext() if is_last else model.no_sync():
        loss(model(x), y).backward()
    if (i + 1) % every == 0:
        optimizer.step()  # <seen>
""",
    ),
    "a function that makes parameters trainable, after the wrapper": (
        "gradient.unsynced",
        """
def thaw(module):
    for p in module.parameters():
        p.requires_grad_(True)


model = DDP(net)
for step in range(20):
    if step == 8:
        thaw(net.body)  # <change>
    loss = f(model(x))
    loss.backward()
    optimizer.step()  # <seen>
""",
    ),
    "the part of a rank in a sampler of its own": (
        "data.overlap",
        """
class Part:
    def __init__(self, rows, rank, world):
        self.rows, self.rank, self.world = rows, rank, world

    def __iter__(self):
        order = torch.randperm(self.rows)
        yield from order[self.rank :: self.world]  # <change>


sampler = Part(len(data), rank, world)
loader = DataLoader(data, batch_size=4, sampler=sampler)  # <seen>
""",
    ),
    "what a method adds to its state": (
        "ranks.state",
        """
class Book(nn.Module):
    def __init__(self):
        self.register_buffer("size", torch.zeros(4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        counts = self.assign(x).sum(0)
        self.size.mul_(0.9).add_(counts)  # <change>
        return self.size


net = Book()
for x in loader:
    loss = net(x).sum()
    loss.backward()
    optimizer.step()  # <seen>
""",
    ),
    "the seed behind a generator": (
        "random.noise",
        """
def source(seed):
    return torch.Generator().manual_seed(seed)


generator = source(11)  # <change>
for x, y in loader:
    noise = torch.randn(x.shape, generator=generator)
    loss = f(model(x + noise), y)  # <seen>
""",
    ),
    "a division in a function": (
        "gradient.scale",
        """
def objective(out, y):
    losses = cross_entropy(out, y, reduction="none")
    return losses.sum() / (16 * world)  # <change>


for x, y in loader:
    loss = objective(model(x), y)
    optimizer.zero_grad()
    loss.backward()  # <seen>
    optimizer.step()
""",
    ),
    "the loss, between sums that are sent": (
        "ranks.gradient",
        """
loader = DataLoader(data, batch_size=32 // world_size)
for x, y in loader:
    total = f(model(x), y).sum()
    stats = torch.stack([total.detach(), y.numel()])
    dist.all_reduce(stats)
    loss = total / stats[1]  # <change>
    loss.backward()
    optimizer.step()  # <seen>
""",
    ),
    "what is computed of the rank's part, below the loop": (
        "eval.shard",
        """
def score(logits, labels):
    hits = (logits.argmax(1) == labels).sum()
    return hits / len(labels)


def evaluate(model, loader):
    logits, labels = [], []
    for x, y in loader:
        logits.append(model(x))  # <seen>
        labels.append(y)
    result = score(torch.cat(logits), torch.cat(labels))  # <change>
    model.train()
    return result.item()


for epoch in range(3):
    accuracy = evaluate(model, loader)
""",
    ),
    "an order without a seed": (
        "data.shared-samples",
        """
class Shards(IterableDataset):
    def pick(self):
        order = list(range(len(self.files)))
        random.Random().shuffle(order)  # <change>
        return order[self.rank :: self.world]

    def __iter__(self):
        rng = random.Random(1000 * self.seed + 10 * self.epoch + self.rank)
        buffer = []
        for number in self.pick():
            buffer += self.files[number]
            if len(buffer) >= self.size:
                yield buffer.pop(rng.randrange(len(buffer)))
        rng.shuffle(buffer)
        yield from buffer


stream = Shards(files, rank, world)
loader = DataLoader(stream, batch_size=4)  # <seen>
""",
    ),
    "a method that writes the weights of one rank": (
        "replicas.drift",
        """
class Average:
    def swap(self):
        for p, q in zip(self.model.parameters(), self.kept):
            p.data.copy_(q)


average = Average(model)
for x, y in loader:
    loss = f(model(x), y)
    loss.backward()
    optimizer.step()  # <seen>
    if rank == 0:
        average.swap()  # <change>
""",
    ),
    "parameters without a gradient are left out": (
        "replicas.drift",
        """
def average(params):
    live = [p for p in params if p.grad is not None]  # <change>
    flat = torch.cat([p.grad.flatten() for p in live])
    dist.all_reduce(flat)
    for p, part in zip(live, flat.split([p.numel() for p in live])):
        p.grad.copy_(part.view_as(p))


model = Net()
for x, y in loader:
    loss = f(model(x), y)
    loss.backward()
    average(list(model.parameters()))
    optimizer.step()  # <seen>
""",
    ),
}


def line_of(text: str, mark: str) -> int:
    """Return the number of the first line with this mark."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if mark in line)


@pytest.mark.parametrize(("rule", "text"), SCRIPTS.values(), ids=list(SCRIPTS))
def test_line_to_change_is_among_the_likely_lines(tmp_path: Path, rule: str, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    finding_line, line_to_change = (line_of(text, mark) for mark in ("<seen>", "<change>"))
    lines = [int(line.rpartition(":")[2]) for line in likely_lines(rule, f"{script}:{finding_line}")]
    assert line_to_change in lines[:3]
    assert finding_line in lines
    assert len(lines) <= 4
    assert len(set(lines)) == len(lines)


def test_only_the_named_variables_are_followed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss = total / batches\ndist.all_reduce(loss)\nscore = hits / rows\nprint(loss, score)\n")
    assert likely_lines("ranks.printed", f"{script}:4", (), ("score",))[0] == f"{script}:3"
    assert likely_lines("ranks.printed", f"{script}:4", (), ("loss",))[0] != f"{script}:3"


def test_recorded_lines_have_precedence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1\nb = 2\nc = 3\noptimizer.step()\n")
    lines = likely_lines("gradient.local", f"{script}:4", (f"{script}:2",))
    assert set(lines) == {f"{script}:4", f"{script}:2"}


@pytest.mark.parametrize("text", [None, "def broken(:\n", ""])
def test_unreadable_file_gives_only_the_recorded_lines(tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert likely_lines("data.same", f"{script}:3", (f"{script}:1",)) == (f"{script}:3", f"{script}:1")
    assert likely_lines("sync.needless", "", ()) == ()
    assert Finding("WARN", "data.same", "", "text").lines == ()


def test_distance_of_statements_to_a_line(tmp_path: Path) -> None:
    """Unrelated assignments are not included. Nearer statements have fewer steps. Recursive calls end."""
    script = tmp_path / "train.py"
    script.write_text(
        "def first(a):\n    return second(a)\n\n\ndef second(a):\n    return first(a)\n\n\n"
        "other = 1\nx = first(3)\ny = x + 1\nuse(y)\n"
    )
    source = read_source(str(script))
    assert source is not None
    steps = {statement.line: cost for statement, cost in source.leading_to(12).items()}
    assert 9 not in steps
    assert steps[12] < steps[11] < steps[10] < steps[2]
    assert source.leading_to(99) == {}
