"""Each kind of mistake, put into a script that is right: found, with its line. Without it, nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing import SCRIPTS, audit_forked, lines_with
from forkserver import ForkServer

BASES = sorted(path.stem for path in SCRIPTS.glob("*.py"))

# (script, what stands there, what is written instead, the rule that must find it, text of the line it must name)
MUTATIONS = [
    # --- data
    ("classifier", "7, sampler=sampler", "7, shuffle=True", "data.same", "loader = DataLoader(train"),
    ("classifier", "sampler = DistributedSampler(train)", "sampler = DistributedSampler(train, seed=rank)",
     "data.overlap", "sampler = DistributedSampler("),
    ("classifier", "        sampler.set_epoch(epoch)\n", "", "data.epoch", "in loader:"),
    ("classifier", "Generator().manual_seed(1)", "Generator().manual_seed(rank)", "data.split",
     "random_split(data"),
    ("classifier", "torch.manual_seed(0)", "torch.manual_seed(rank)", "data.content", "loader = DataLoader(train"),
    ("classifier", "DistributedSampler(train)", "DistributedSampler(train, 4, rank)", "data.skipped",
     "loader = DataLoader(train"),
    ("language", "manual_seed(7 + rank)", "manual_seed(7)", "data.rows", "ddp(inputs)"),
    ("sharded", "sampler = DistributedSampler(data)", "sampler = DistributedSampler(data, 2, 0)", "data.same",
     "loader = DataLoader("),
    ("stream", " * worker.num_workers + worker.id", "", "data.repeat", "loader = DataLoader("),
    ("stream", "part = dist.get_rank() * worker.num_workers + worker.id", "part = worker.id", "data.rows",
     "model(inputs)"),
    # --- gradients
    ("classifier", "            optimizer.zero_grad()\n", "", "gradient.carried", "optimizer.step()"),
    ("classifier", "            loss.backward()", "            (loss / world_size).backward()", "gradient.scale",
     "F.cross_entropy(model"),
    ("classifier", "            loss.backward()", "            (loss * 0).backward()", "gradient.zero",
     "optimizer.step()"),
    ("language", "loss * world_size / count", "loss / count", "gradient.scale", "loss = F.cross_entropy("),
    ("language", 'ignore_index=PAD, reduction="sum")', "ignore_index=PAD) * count / world_size / ACCUMULATE",
     "gradient.ragged", "loss = F.cross_entropy("),
    ("language", "if is_last else", "if index == 0 else", "gradient.weights", "scaler.step(optimizer)"),
    ("language", "contextlib.nullcontext() if is_last else ddp.no_sync()", "ddp.no_sync()", "gradient.local",
     "scaler.step(optimizer)"),
    ("sharded", "own_targets) / 2", "own_targets)", "gradient.scale", "F.mse_loss("),
    ("sharded", "index == 1", "index == 0", "gradient.", "optimizer.step()"),
    ("stream", "                parameter.grad /= world_size\n", "", "gradient.scale", ".mean()"),
    ("stream", "for parameter in model.parameters():", "for parameter in model[2:].parameters():",
     "gradient.unsynced", "optimizer.step()"),
    ("language", "            is_last = ", "            optimizer.zero_grad()\n            is_last = ",
     "gradient.thrown-away", "            optimizer.zero_grad()"),
    ("stream", "            loss.backward()", "            (loss / (loss - loss)).backward()", "gradient.nan",
     "optimizer.step()"),
    ("stream", "                parameter.grad /= world_size\n",
     "                parameter.grad = parameter.grad.sign() / world_size\n", "gradient.unexplained",
     "optimizer.step()"),
    # --- clipping
    ("language", "        scaler.unscale_(optimizer)\n", "", "clip.scaled", "clip_grad_norm_"),
    ("language", "                scaler.scale(loss * world_size / count).backward()\n",
     "                scaler.scale(loss * world_size / count).backward()\n"
     "                nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)\n", "clip.", "clip_grad_norm_(ddp.parameters()"),
    # --- replicas
    ("classifier", "F.cross_entropy(model(inputs)", "F.cross_entropy(model.module(inputs)", "replicas.unwrapped",
     "model.module(inputs), labels)"),
    ("stream", "torch.manual_seed(0)", "torch.manual_seed(rank)", "replicas.drift", "optimizer.step()"),
    ("stream", "                dist.all_reduce(parameter.grad)\n", "", "replicas.", "optimizer.step()"),
    ("classifier", "optim.SGD(model.parameters()", "optim.SGD(model.module[0].parameters()", "weights.not-stepped",
     "optimizer = "),
    ("classifier", "nn.Dropout(0.1)", "nn.Dropout(0.1), nn.BatchNorm1d(32)", "replicas.buffers",
     "model.module(inputs)"),
    ("sharded", "in model[::2]:", "in model[:3:2]:", "weights.uninitialised", "to_empty"),
    ("classifier", "lr=0.1,", "lr=0.1 * (1 + rank),", "replicas.rate", "optimizer.step()"),
    # --- evaluation
    ("classifier", "Subset(held_out, range(rank, len(held_out), world_size)), 5)",
     "held_out, 5, sampler=DistributedSampler(held_out, shuffle=False))", "eval.padded", "DataLoader(held_out"),
    ("classifier", "    dist.all_reduce(totals)\n", "", "eval.shard", "DataLoader(Subset"),
    ("classifier", "[loss * len(labels), hits, len(labels)]", "[loss, hits / len(labels), 1]", "eval.mean-of-means",
     "loss = F.cross_entropy(output"),
    ("classifier", "    model.eval()\n", "", "eval.mode", "model.module(inputs)"),
    ("classifier", "world_size)), 5)", "world_size)), 5, drop_last=True)", "eval.dropped", "DataLoader(Subset"),
    ("classifier", "    dist.all_reduce(totals)\n    model.train()\n", "    dist.all_reduce(totals)\n", "train.mode",
     "model(inputs), labels"),
    ("classifier", "nn.Dropout(0.1)",
     'type("Noise", (nn.Module,), {"forward": lambda self, x: F.dropout(x, 0.1)})()', "eval.dropout",
     "model.module(inputs)"),
    # --- the learning rate
    ("classifier", "            optimizer.step()\n",
     "            optimizer.step()\n            schedule.step(), schedule.step()\n", "schedule.often",
     "schedule.step()"),
    # --- randomness
    ("classifier", "torch.manual_seed(100 + rank)", "torch.manual_seed(100)", "random.dropout",
     "model(inputs), labels"),
    ("stream", "torch.initial_seed() + dist.get_rank()", "torch.initial_seed()", "random.augment",
     "loader = DataLoader("),
    ("stream", "torch.initial_seed() + dist.get_rank()", "dist.get_rank()", "random.workers", "loader = DataLoader("),
    # --- saving
    ("classifier", "        if rank == 0:\n            print", "        if True:\n            print", "save.race",
     "torch.save("),
    # --- speed
    ("classifier", "DistributedDataParallel(model)", "DistributedDataParallel(model, find_unused_parameters=True)",
     "ddp.find-unused", "find_unused"),
    ("language", "contextlib.nullcontext() if is_last else ddp.no_sync()", "contextlib.nullcontext()",
     "sync.needless", "ddp(inputs)"),
]  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_nothing_is_said_of_a_script_that_is_right(forkserver: ForkServer, tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text((SCRIPTS / f"{name}.py").read_text())
    audit = audit_forked(forkserver, tmp_path, tmp_path / "train.py")
    assert [finding for finding in audit.findings if finding.level != "NOTE"] == []
    assert audit.updates >= 8
    assert not (tmp_path / "last.pt").exists(), "what the script saves goes elsewhere"


# what is right, too: (script, what stands there, what is written instead)
ALSO_RIGHT = [
    (  # divided by hand
        "classifier",
        "DataLoader(train, 7, sampler=sampler, drop_last=True)",
        "DataLoader(Subset(train, range(rank, 100, world_size)), 7, shuffle=True)",
    ),
    (
        "classifier",
        "    dist.all_reduce(totals)\n",
        "    dist.all_reduce(totals[:2])\n    dist.all_reduce(totals[2:])\n",
    ),
    ("language", "loss * world_size / count", "loss / count * dist.get_world_size()"),
    ("stream", "parameter.grad /= world_size", "parameter.grad.div_(world_size)"),
]


@pytest.mark.parametrize(("name", "before", "after"), ALSO_RIGHT)
def test_another_right_way(forkserver: ForkServer, tmp_path: Path, name: str, before: str, after: str) -> None:
    text = (SCRIPTS / f"{name}.py").read_text()
    assert text.count(before) == 1
    (tmp_path / "train.py").write_text(text.replace(before, after))
    audit = audit_forked(forkserver, tmp_path, tmp_path / "train.py")
    assert [finding for finding in audit.findings if finding.level != "NOTE"] == []


@pytest.mark.parametrize(
    ("name", "before", "after", "rule", "line"),
    MUTATIONS,
    ids=[f"{mutation[0]}-{mutation[3]}-{place}" for place, mutation in enumerate(MUTATIONS)],
)
def test_a_mistake_is_found_with_its_line(
    forkserver: ForkServer, tmp_path: Path, name: str, before: str, after: str, rule: str, line: str
) -> None:
    text = (SCRIPTS / f"{name}.py").read_text()
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    text = text.replace(before, after)
    (tmp_path / "train.py").write_text(text)
    audit = audit_forked(forkserver, tmp_path, tmp_path / "train.py")
    found = [finding for finding in audit.findings if finding.rule.startswith(rule) and finding.level != "NOTE"]
    assert found, [(finding.level, finding.rule, finding.text) for finding in audit.findings]
    named = {int(place.rpartition(":")[2]) for place in (found[0].place, *found[0].also)}
    assert named.intersection(lines_with(text, line)), (found, line)
    assert found[0].fix
