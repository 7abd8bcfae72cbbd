"""Every edit that `everyrank audit --fix` can try, on a few lines of code."""

from __future__ import annotations

import ast
import itertools
import textwrap
from pathlib import Path

import pytest

from everyrank.audit import Finding
from everyrank.repair.edited_script import CannotRepairError, EditedScript, line_of
from everyrank.repair.fix import edited_by, is_editable
from everyrank.repair.remedies import REMEDIES, remedies_for

# Each case has the rule, the text of the finding, the script, and the script after the first remedy that fits.
# The mark "#!" is at the line of the finding.
EDITS = [
    (
        "eval.padded",
        "",
        """
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Subset
        loader = DataLoader(dataset=x, batch_size=8, sampler=DistributedSampler(x)) #!
        """,
        """
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Subset
        loader = DataLoader(dataset=Subset(x, range(dist.get_rank(), len(x), dist.get_world_size())), batch_size=8) #!
        """,
    ),
    (
        "data.same",
        "",
        """
        from torch.utils.data.distributed import DistributedSampler
        loader = DataLoader(data, 8, True) #!
        """,
        """
        from torch.utils.data.distributed import DistributedSampler
        loader = DataLoader(data, 8, sampler=DistributedSampler(data)) #!
        """,
    ),
    (
        "data.overlap",
        "",
        """
        import torch
        sampler = DistributedSampler(data, 4, 0, False, 7) #!
        """,
        """
        import torch
        sampler = DistributedSampler(data, shuffle=False, seed=7) #!
        """,
    ),
    (
        "clip.local",
        "",
        """
        import torch
        for x in loader:
            for part in x:
                loss(part).backward()
                clip(model.parameters()) #!
            if True:
                optimizer.step()
            scheduler.step()
        """,
        """
        import torch
        for x in loader:
            for part in x:
                loss(part).backward()
            if True:
                clip(model.parameters())
                optimizer.step()
            scheduler.step()
        """,
    ),
    (
        "gradient.scale",
        "not divided by the 4 backwards",
        """
        import torch
        for epoch in range(9):
            for i, x in enumerate(loader):
                loss(x).backward() #!
                if (i + 1) % ACCUMULATE == 0:
                    optimizer.step()
                    for schedule in schedules:
                        if i % 100 == 0:
                            schedule.step()
        """,
        """
        import torch
        for epoch in range(9):
            for i, x in enumerate(loader):
                (loss(x) / ACCUMULATE).backward() #!
                if (i + 1) % ACCUMULATE == 0:
                    optimizer.step()
                    for schedule in schedules:
                        if i % 100 == 0:
                            schedule.step()
        """,
    ),
    (
        "random.dropout",
        "",
        """
        import torch
        import torch.distributed as dist
        model = DDP(model)
        torch.manual_seed(args.seed if args.seed else 0)
        y = model(x) #!
        """,
        """
        import torch
        import torch.distributed as dist
        model = DDP(model)
        torch.manual_seed((args.seed if args.seed else 0) + dist.get_rank())
        y = model(x) #!
        """,
    ),
    (
        "eval.dropout",
        "",
        """
        import torch.nn.functional as fn
        class Net(Module):
            def forward(self, x):
                return fn.dropout(block.dropout(x), 0.1) #!
        """,
        """
        import torch.nn.functional as fn
        class Net(Module):
            def forward(self, x):
                return fn.dropout(block.dropout(x), 0.1, training=self.training) #!
        """,
    ),
    (
        "data.same",
        "",
        """
        from torch.utils.data import DataLoader
        loader = DataLoader(data, 8, shuffle=True, num_workers=2) #!
        for epoch in range(3):
            for batch in tqdm(loader):
                train(batch)
        """,
        """
        from torch.utils.data import DataLoader
        from torch.utils.data.distributed import DistributedSampler
        loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2) #!
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            for batch in tqdm(loader):
                train(batch)
        """,
    ),
    (
        "data.same",
        "",
        """
        from torch.utils.data.distributed import DistributedSampler as Sampler
        loader = DataLoader( #!
            dataset=data,
            shuffle=is_training,
        )
        """,
        """
        from torch.utils.data.distributed import DistributedSampler as Sampler
        loader = DataLoader( #!
            dataset=data,
            sampler=Sampler(data, shuffle=is_training),
        )
        """,
    ),
    (
        "data.epoch",
        "the second epoch has the order of the first: set_epoch is not called",
        """
        def train(loader, epochs):
            for _ in range(epochs):
                for index, (x, y) in enumerate(loader): #!
                    step(x, y)
        """,
        """
        def train(loader, epochs):
            for epoch in range(epochs):
                loader.sampler.set_epoch(epoch)
                for index, (x, y) in enumerate(loader): #!
                    step(x, y)
        """,
    ),
    (
        "data.epoch",
        "set_epoch is not called",
        """
        def train_epoch(self, epoch):
            for x in self.loader: #!
                step(x)
        """,
        """
        def train_epoch(self, epoch):
            self.loader.sampler.set_epoch(epoch)
            for x in self.loader: #!
                step(x)
        """,
    ),
    (
        "data.epoch",
        "the second epoch has the order of the first: the data is not shuffled",
        """
        sampler = DistributedSampler(data, shuffle=False)
        loader = DataLoader(data, 8, sampler=sampler) #!
        sampler.set_epoch(epoch)
        """,
        """
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 8, sampler=sampler) #!
        sampler.set_epoch(epoch)
        """,
    ),
    (
        "data.overlap",
        "",
        "sampler = DistributedSampler(data, seed=rank, drop_last=True) #!",
        "sampler = DistributedSampler(data, drop_last=True) #!",
    ),
    (
        "data.skipped",
        "",
        "sampler = DistributedSampler(data, 4, rank, shuffle=True) #!",
        "sampler = DistributedSampler(data, shuffle=True) #!",
    ),
    (
        "data.split",
        "",
        "train, test = random_split(data, [80, 20]) #!",
        "train, test = random_split(data, [80, 20], generator=torch.Generator().manual_seed(0)) #!",
    ),
    (
        "gradient.carried",
        "",
        """
        if True:
            scaler.step(optimizer) #!
            scaler.update()
        """,
        """
        if True:
            scaler.step(optimizer) #!
            optimizer.zero_grad()
            scaler.update()
        """,
    ),
    (
        "gradient.thrown-away",
        "",
        """
        for index, x in enumerate(loader):
            optimizer.zero_grad() #!
            loss(x).backward()
            if index % 2:
                optimizer.step()
        """,
        """
        for index, x in enumerate(loader):
            loss(x).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "gradient.scale",
        "it is divided by the 2 ranks once too often",
        """
        loss = criterion(model(x), y) #!
        (loss / world_size).backward()
        """,
        """
        loss = criterion(model(x), y) #!
        loss.backward()
        """,
    ),
    (
        "gradient.scale",
        "it is divided by the 2 ranks once too often",
        """
        import torch.distributed as dist
        loss = criterion(model(x), y, reduction="sum") / len(y) #!
        loss.backward()
        """,
        """
        import torch.distributed as dist
        loss = criterion(model(x), y, reduction="sum") / len(y) #!
        (loss * dist.get_world_size()).backward()
        """,
    ),
    (
        "gradient.scale",
        "the loss is multiplied by the 2 ranks",
        """
        loss = criterion(model(x), y) #!
        loss *= args.world_size
        loss.backward()
        """,
        """
        loss = criterion(model(x), y) #!
        loss.backward()
        """,
    ),
    (
        "gradient.scale",
        "the loss is not divided by the 4 backwards of an update",
        """
        loss = criterion(model(x), y) #!
        scaler.scale(loss).backward()
        if (i + 1) % args.accumulate == 0:
            scaler.step(optimizer)
        """,
        """
        loss = criterion(model(x), y) #!
        scaler.scale(loss / args.accumulate).backward()
        if (i + 1) % args.accumulate == 0:
            scaler.step(optimizer)
        """,
    ),
    (
        "gradient.scale",
        "the loss is divided by the 4 backwards twice",
        """
        loss = criterion(model(x), y) / 4 #!
        (loss / 4).backward()
        """,
        """
        loss = criterion(model(x), y) / 4 #!
        loss.backward()
        """,
    ),
    (
        "gradient.weights",
        "",
        """
        with model.no_sync() if index else nullcontext():
            loss.backward()
        optimizer.step() #!
        """,
        """
        with nullcontext():
            loss.backward()
        optimizer.step() #!
        """,
    ),
    (
        "gradient.local",
        "",
        """
        import torch
        with model.no_sync():
            loss.backward()
        optimizer.step() #!
        """,
        """
        import torch
        from contextlib import nullcontext
        with nullcontext():
            loss.backward()
        optimizer.step() #!
        """,
    ),
    (
        "clip.scaled",
        "",
        """
        scaler.scale(loss).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0) #!
        scaler.step(optimizer)
        """,
        """
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0) #!
        scaler.step(optimizer)
        """,
    ),
    (
        "clip.local",
        "",
        """
        for part in parts:
            loss(part).backward()
            clip_grad_norm_(model.parameters(), 1.0) #!
        optimizer.step()
        """,
        """
        for part in parts:
            loss(part).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        """,
    ),
    (
        "replicas.unwrapped",
        "",
        "loss = F.cross_entropy(model.module(x), y) #!",
        "loss = F.cross_entropy(model(x), y) #!",
    ),
    (
        "replicas.unwrapped",
        "",
        """
        net = model.module if fast else model
        loss = F.cross_entropy(net(x), y) #!
        """,
        """
        net = model if fast else model
        loss = F.cross_entropy(net(x), y) #!
        """,
    ),
    (
        "replicas.unwrapped",
        "",
        """
        ddp = DDP(net, device_ids=[0])
        loss = F.cross_entropy(net(x), y) #!
        """,
        """
        ddp = DDP(net, device_ids=[0])
        loss = F.cross_entropy(ddp(x), y) #!
        """,
    ),
    (
        "replicas.drift",
        "parameters differ between the ranks since the start (seeds here: 0, 1)",
        """
        import torch.distributed as dist
        torch.manual_seed(rank) #!
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        """,
        """
        import torch.distributed as dist
        torch.manual_seed(rank) #!
        net = Net()
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, 0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        """,
    ),
    (
        "schedule.often",
        "",
        """
        optimizer.step()
        for _ in range(world_size):
            schedule.step() #!
        print(loss)
        """,
        """
        optimizer.step()
        schedule.step() #!
        print(loss)
        """,
    ),
    (
        "random.dropout",
        "",
        """
        import torch.distributed as dist
        torch.manual_seed(args.seed)
        model = DistributedDataParallel(Net())
        model(x) #!
        """,
        """
        import torch.distributed as dist
        torch.manual_seed(args.seed)
        model = DistributedDataParallel(Net())
        torch.manual_seed(args.seed + dist.get_rank())
        model(x) #!
        """,
    ),
    (
        "random.noise",
        "",
        """
        from torch import distributed
        generator = torch.Generator().manual_seed(5)
        torch.randn(3, generator=generator) #!
        """,
        """
        from torch import distributed
        generator = torch.Generator().manual_seed(5 + distributed.get_rank())
        torch.randn(3, generator=generator) #!
        """,
    ),
    (
        "eval.padded",
        "",
        """
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Subset
        loader = DataLoader(held_out, 5, sampler=DistributedSampler(held_out, shuffle=False)) #!
        """,
        """
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Subset
        loader = DataLoader(Subset(held_out, range(dist.get_rank(), len(held_out), dist.get_world_size())), 5) #!
        """,
    ),
    (
        "eval.dropped",
        "",
        "loader = DataLoader(held_out, drop_last=True, batch_size=5) #!",
        "loader = DataLoader(held_out, batch_size=5) #!",
    ),
    (
        "eval.mode",
        "",
        """
        with torch.no_grad():
            for x, y in loader:
                output = model.module(x) #!
        """,
        """
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                output = model.module(x) #!
        model.train()
        """,
    ),
    (
        "train.mode",
        "",
        """
        for x, y in loader:
            loss = F.mse_loss(net(x), y) #!
        """,
        """
        net.train()
        for x, y in loader:
            loss = F.mse_loss(net(x), y) #!
        """,
    ),
    (
        "eval.dropout",
        "",
        """
        class Net(nn.Module):
            def forward(self, x):
                return F.dropout(self.layer(x), 0.1)
        model(x) #!
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                return F.dropout(self.layer(x), 0.1, training=self.training)
        model(x) #!
        """,
    ),
    (
        "eval.dropout",
        "",
        """
        class Net(nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        model(x) #!
        """,
        """
        class Net(nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        model(x) #!
        """,
    ),
    (
        "save.race",
        "",
        """
        import torch.distributed as dist
        torch.save({ #!
            "model": model.state_dict(),
        }, "last.pt")
        """,
        """
        import torch.distributed as dist
        if dist.get_rank() == 0:
            torch.save({ #!
                "model": model.state_dict(),
            }, "last.pt")
        """,
    ),
    (
        "ddp.find-unused",
        "",
        "model = DDP(model, find_unused_parameters=True, device_ids=[0]) #!",
        "model = DDP(model, device_ids=[0]) #!",
    ),
    ("ddp.buckets", "", "model = DDP(model, bucket_cap_mb=0.001) #!", "model = DDP(model) #!"),
]

# Each case has the rule, the script, the helper function that the edit adds, and the line that calls it.
WITH_HELPERS = [
    (
        "gradient.ragged",
        """
        import torch
        for x, labels in loader:
            loss = F.cross_entropy(model(x), labels, ignore_index=PAD) #!
            loss.backward()
        """,
        "def mean_over_ranks(",
        "    mean_over_ranks(loss, (labels != PAD).sum()).backward()",
    ),
    (
        "gradient.ragged",
        """
        import torch
        for x, labels, mask in loader:
            loss = losses.sum() / mask.sum() #!
            loss.backward()
        """,
        "def mean_over_ranks(",
        "    mean_over_ranks(loss, mask.sum()).backward()",
    ),
    (
        "schedule.differs",
        """
        import torch
        plateau.step(loss.item()) #!
        """,
        "def add_over_ranks(",
        "plateau.step(add_over_ranks(float(loss.item())) / dist.get_world_size())",
    ),
    (
        "eval.shard",
        """
        import torch
        def evaluate(loader):
            hits = seen = 0
            for x, y in loader:
                hits += (model(x).argmax(1) == y).sum().item() #!
                seen += len(y)
            return hits / seen
        """,
        "def add_over_ranks(",
        "    hits, seen = add_over_ranks(hits, seen)",
    ),
    (
        "eval.mean-of-means",
        """
        import torch
        def evaluate(loader):
            total = batches = 0
            with torch.no_grad():
                for x, y in loader:
                    total += F.cross_entropy(model(x), y).item() #!
                    batches += 1
            return total / batches
        """,
        "def add_over_ranks(",
        "            batches += len(y)",
    ),
    (
        "eval.mean-of-means",
        """
        import torch
        def evaluate(loader):
            total = 0
            for x, y in loader:
                hits = (model(x).argmax(1) == y).float().mean() #!
                total += hits
            return total / len(loader)
        """,
        "def add_over_ranks(",
        "    total, num_terms = add_over_ranks(total, num_terms)",
    ),
    (
        "eval.mean-of-means",
        """
        import torch
        def evaluate(loader):
            losses = []
            for x, y in loader:
                losses.append(F.cross_entropy(model(x), y, ignore_index=-1)) #!
            return torch.stack(losses).mean()
        """,
        "def add_over_ranks(",
        "    losses = [total / num_terms]",
    ),
]


def dedented(text: str) -> str:
    """Return the text without its indentation, with one line end."""
    return textwrap.dedent(text).strip("\n") + "\n"


def finding_at_mark(rule: str, text: str, script: str) -> Finding:
    """Return a finding at the line of the script that has the mark "#!"."""
    line_number = next(index for index, source_line in enumerate(script.splitlines(), 1) if "#!" in source_line)
    return Finding("FAIL", rule, f"train.py:{line_number}", text)


def apply_first_fitting_remedy(finding: Finding, script: str) -> str:
    """Return the script after the first remedy that can edit it."""
    for remedy in remedies_for(finding):
        try:
            return edited_by(script, [(finding, remedy)])[0]
        except CannotRepairError:
            continue
    pytest.fail("no remedy fits")


@pytest.mark.parametrize(
    ("rule", "text", "before", "after"), EDITS, ids=[f"{i}-{row[0]}" for i, row in enumerate(EDITS)]
)
def test_edit_repairs_the_script(rule: str, text: str, before: str, after: str) -> None:
    """The first remedy that fits gives exactly this script."""
    script = dedented(before)
    assert apply_first_fitting_remedy(finding_at_mark(rule, text, script), script) == dedented(after)


@pytest.mark.parametrize(("rule", "before", "helper", "line"), WITH_HELPERS, ids=[row[0] for row in WITH_HELPERS])
def test_edit_adds_a_helper_function(rule: str, before: str, helper: str, line: str) -> None:
    """The edited script defines the helper and calls it."""
    script = dedented(before)
    edited = apply_first_fitting_remedy(finding_at_mark(rule, "", script), script)
    assert helper in edited
    assert line in edited.replace(" #!", "").splitlines()
    ast.parse(edited)


def test_every_rule_with_an_edit_has_a_case() -> None:
    """EDITS and WITH_HELPERS have a case for each rule."""
    rules_with_cases = {row[0] for row in itertools.chain(EDITS, WITH_HELPERS)}
    assert {rule for rule, _, _ in REMEDIES} - rules_with_cases == {"random.augment"}  # the same edits as random.noise


def test_script_without_matching_code_is_not_edited() -> None:
    """There is no DataLoader to edit."""
    script = "batches = make(data) #!\n"
    for remedy in remedies_for(finding_at_mark("data.same", "", script)):
        with pytest.raises(CannotRepairError):
            remedy(EditedScript(script), finding_at_mark("data.same", "", script))


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("eval.shard", "predictions += model(x).tolist()"),
        ("eval.shard", "correct[y] += 1"),
        ("eval.mean-of-means", "count += 1; stop = count if count > 9 else 0; total += F.mse_loss(model(x), y)"),
    ],
)
def test_sums_that_are_no_numbers_or_count_batches_are_not_edited(rule: str, line: str) -> None:
    """Lists of all ranks would be added element by element, and a count of samples would end the loop early."""
    script = dedented(
        f"""
        predictions, total = [], 0
        for x, y in loader:
            {line} #!
            total += len(y)
        """
    )
    for remedy in remedies_for(finding_at_mark(rule, "", script)):
        with pytest.raises(CannotRepairError):
            remedy(EditedScript(script), finding_at_mark(rule, "", script))


def test_loader_with_unknown_arguments_is_not_edited() -> None:
    finding = Finding("FAIL", "data.same", "train.py:1", "")
    remedy = remedies_for(finding)[0]
    with pytest.raises(CannotRepairError, match="does not name its dataset"):
        remedy(EditedScript("loader = DataLoader(*args)"), finding)


def test_line_of_another_file_is_not_taken_for_one_of_the_script() -> None:
    script = "total = 0\nfor x in loader:\n    total += x\nprint(total) #!\n"
    finding = Finding("FAIL", "eval.shard", "train.py:4", "", other_lines=("engine.py:3",))
    (remedy,) = remedies_for(finding)
    with pytest.raises(CannotRepairError):
        remedy(EditedScript(script), finding)


def test_place_in_another_file_has_no_line(tmp_path: Path) -> None:
    """`line_of` returns 0 for a place in a different file."""
    script = tmp_path / "train.py"
    assert line_of(f"{script}:7", script) == 7
    assert line_of(f"{tmp_path / 'engine.py'}:7", script) == 0
    assert line_of("", script) == 0


def test_fix_is_offered_only_for_editable_findings(tmp_path: Path) -> None:
    """The audit offers --fix only for a mistake in the script itself that has an edit."""
    script = tmp_path / "train.py"
    assert is_editable(Finding("FAIL", "gradient.carried", f"{script}:3", ""), script)
    assert not is_editable(Finding("NOTE", "gradient.scale", f"{script}:3", "divided by the 2 ranks"), script)
    assert not is_editable(Finding("FAIL", "replicas.rate", f"{script}:3", ""), script)
    assert not is_editable(Finding("FAIL", "gradient.carried", f"{tmp_path / 'engine.py'}:3", ""), script)


def test_statement_that_shares_its_line_is_not_removed() -> None:
    """Removing the line would also remove the other statement."""
    script = dedented(
        """
        for x in loader:
            prepare(x); optimizer.zero_grad() #!
            loss(x).backward()
        optimizer.step()
        """
    )
    finding = finding_at_mark("gradient.thrown-away", "", script)
    (remedy,) = remedies_for(finding)
    with pytest.raises(CannotRepairError, match="cannot be removed"):
        remedy(EditedScript(script), finding)
