"""Mistakes put into correct scripts: the audit finds each one with its line. The correct scripts have no findings."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import everyrank.audit.rules as judge_rules
from auditing import SCRIPTS, RecordedScript, line_numbers_with, record_forked_script
from everyrank.audit import Audit, Finding
from everyrank.audit.finding import Findings
from forkserver import ForkServer

CORRECT_SCRIPTS = sorted(path.stem for path in SCRIPTS.glob("*.py"))

BEFORE_NOISE = ("sampler = DistributedSampler(train)\n", "            loss = F.cross_entropy(model(inputs), labels)\n")
NOISE_MODULE = 'type("Noise", (nn.Module,), {"forward": lambda self, x: x + torch.randn_like(x) * self.training})()'
LOSS_OF_GATHERED_OUTPUTS = (
    "            outputs = __import__('torch.distributed.nn').distributed.nn.functional.all_gather(model(inputs))\n"
    "            loss = F.cross_entropy(torch.stack(outputs).mean(0), labels)\n"
)
ENSEMBLE = (  # the same samples on all ranks, different noise on each rank, and one loss of all outputs
    ("DistributedSampler(train)", "nn.Dropout(0.1)", BEFORE_NOISE[1]),
    ("DistributedSampler(train, 1, 0)", NOISE_MODULE, LOSS_OF_GATHERED_OUTPUTS),
)
LOADER = "    loader = DataLoader(train, 7, sampler=sampler, drop_last=True)\n"
LOCAL_DATA = (
    "    part = TensorDataset(*(tensor[{part}] for tensor in data.tensors))\n"
    "    loader = DataLoader(part, 7, shuffle=True, drop_last=True)\n"
)
# (script, original text, replacement, expected rule, text of the line that it must name). Words after the rule must
# be in the text of the finding. Several replacements are tuples.
AVERAGE_PLACES = ("    optimizer = ", "            optimizer.step()\n", "        if rank == 0:\n            print(")


def moving_average(frozen: str, condition: str = "") -> tuple[str, str, str]:
    """Return what stands at `AVERAGE_PLACES` in a script that evaluates a moving average on all ranks."""
    return (
        "    average = torch.optim.swa_utils.AveragedModel(model.module)" + frozen + "\n    optimizer = ",
        f"            optimizer.step()\n            {condition}average.update_parameters(model.module)\n",
        "        evaluate(average, held_out, rank, world_size)\n        if rank == 0:\n            print(",
    )


MUTATIONS = [
    # --- data
    ("classifier", "7, sampler=sampler", "7, shuffle=True", "data.same", "loader = DataLoader(train"),
    ("classifier", "sampler = DistributedSampler(train)", "sampler = DistributedSampler(train, seed=rank)",
     "data.overlap", "sampler = DistributedSampler("),
    ("classifier", "        sampler.set_epoch(epoch)\n", "", "data.epoch", "in loader:"),
    ("classifier", "Generator().manual_seed(1)", "Generator().manual_seed(rank)", "data.split",
     "random_split(data"),
    ("classifier", "torch.manual_seed(0)", "torch.manual_seed(rank)", "data.content", "loader = DataLoader(train"),
    ("classifier", "sampler=sampler", "sampler=list(sampler)", "data.epoch not shuffled",
     "loader = DataLoader(train"),
    ("classifier", "DistributedSampler(train)", "DistributedSampler(train, shuffle=False)",
     "data.epoch not shuffled", "loader = DataLoader(train"),
    ("sharded", "DistributedSampler(data)", "DistributedSampler(data, shuffle=False)", "data.epoch not shuffled",
     "loader = DataLoader("),
    ("language", "manual_seed(7 + rank)", "manual_seed(7)\n    if rank:\n        get_batch(tokens, generator)",
     "data.rows at a different step", "ddp(inputs)"),
    ("language", "manual_seed(7 + rank)", "manual_seed(7)\n    for group in dist.new_group(), dist.new_group():\n"
     "        dist.all_reduce(torch.zeros(1), group=group)", "data.rows tensor or context", "ddp(inputs)"),
    ("classifier", "DistributedSampler(train)", "DistributedSampler(train, 4, rank)", "data.skipped",
     "loader = DataLoader(train"),
    ("language", "manual_seed(7 + rank)", "manual_seed(7)", "data.rows", "ddp(inputs)"),
    ("sharded", "sampler = DistributedSampler(data)", "sampler = DistributedSampler(data, 2, 0)", "data.same",
     "loader = DataLoader("),
    ("stream", " * worker.num_workers + worker.id", "", "data.repeat", "loader = DataLoader("),
    ("stream", "part = dist.get_rank() * worker.num_workers + worker.id", "part = worker.id", "data.rows",
     "loader = DataLoader("),
    ("classifier", LOADER, LOCAL_DATA.format(part="20 * rank : 20 * rank + 60"), "data.overlap",
     "loader = DataLoader(part"),
    ("classifier", LOADER, LOCAL_DATA.format(part="torch.randperm(101, generator=torch.Generator().manual_seed(rank))"),
     "data.same in its own order", "loader = DataLoader(part"),
    ("classifier", "    sampler = DistributedSampler(train)\n",
     "    weights = torch.utils.data.WeightedRandomSampler([1.0] * 101, 101)\n"
     "    DataLoader(train, 7, sampler=weights)\n    del weights\n    sampler = DistributedSampler(train)\n",
     "data.sampler-lost WeightedRandomSampler", "sampler = DistributedSampler("),
    # --- gradients
    ("classifier", "            optimizer.zero_grad()\n", "", "gradient.carried", "optimizer.step()"),
    ("flat", "            optimizer.zero_grad()\n", "", "gradient.carried", "optimizer.step()"),
    ("flat", "own_targets) / 2", "own_targets)", "gradient.scale not divided by the 2 backwards", "F.mse_loss("),
    ("classifier", "            optimizer.zero_grad()\n",
     "            optimizer.zero_grad()\n            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
     "clip.nothing", "nn.utils.clip_grad_norm_("),
    ("classifier", "            optimizer.step()\n",
     "            optimizer.step()\n            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
     "clip.late", "nn.utils.clip_grad_norm_("),
    ("flat", "model.clip_grad_norm_(0.5)", "nn.utils.clip_grad_norm_(model.parameters(), 0.5)", "clip.local",
     "nn.utils.clip_grad_norm_("),
    ("classifier", "            loss.backward()", "            (loss / world_size).backward()",
     "gradient.scale divided by the 2 ranks", "F.cross_entropy(model"),
    ("classifier", "            loss.backward()", "            (loss * world_size).backward()",
     "gradient.scale multiplied by the 2 ranks", "F.cross_entropy(model"),
    ("classifier", "            loss.backward()", "            (loss * 0).backward()", "gradient.zero",
     "optimizer.step()"),
    ("language", "loss * world_size / count", "loss / count",
     "gradient.scale divided by the 2 ranks", "loss = F.cross_entropy("),
    ("language", 'ignore_index=PAD, reduction="sum")', "ignore_index=PAD) * count / world_size / ACCUMULATE",
     "gradient.ragged", "loss = F.cross_entropy("),
    ("language", "if is_last else", "if index == 0 else", "gradient.weights", "scaler.step(optimizer)"),
    ("language", "contextlib.nullcontext() if is_last else ddp.no_sync()", "ddp.no_sync()", "gradient.local",
     "scaler.step(optimizer)"),
    ("language", "if is_last else", "if index == 0 else", "gradient.weights", "ddp.no_sync()"),
    ("sharded", "own_targets) / 2", "own_targets)", "gradient.scale not divided by the 2 backwards", "F.mse_loss("),
    ("sharded", ("zip(inputs.chunk(2), targets.chunk(2)", "index == 1", "own_targets) / 2"),
     ("zip(inputs.chunk(4), targets.chunk(4)", "index == 3", "own_targets) / 16"),
     "gradient.scale divided by the 4 backwards twice", "F.mse_loss("),
    ("sharded", ("DataLoader(data, 8", "zip(inputs.chunk(2), targets.chunk(2)", "index == 1"),
     ("DataLoader(data, 14", "zip(inputs.split(7), targets.split(7)", "index == (len(inputs) - 1) // 7"),
     "gradient.scale divided by 2 backwards", "F.mse_loss("),
    ("sharded", "index == 1", "index == 0", "gradient.weights", "optimizer.step()"),
    ("stream", "                parameter.grad /= world_size\n", "", "gradient.scale summed over the 2 ranks",
     ".mean()"),
    ("stream", "for parameter in model.parameters():", "for parameter in model[2:].parameters():",
     "gradient.unsynced", "optimizer.step()"),
    ("language", "            is_last = ", "            optimizer.zero_grad()\n            is_last = ",
     "gradient.thrown-away", "            optimizer.zero_grad()"),
    ("stream", "            loss.backward()", "            (loss / (loss - loss)).backward()", "gradient.nan",
     "optimizer.step()"),
    ("stream", "                parameter.grad /= world_size\n",
     "                parameter.grad = parameter.grad.abs() / world_size\n", "gradient.unexplained",
     "optimizer.step()"),
    ("stream", "                dist.all_reduce(parameter.grad)\n                parameter.grad /= world_size\n",
     "                pass\n", "gradient.local", "optimizer.step()"),
    # --- clipping
    ("language", "        scaler.unscale_(optimizer)\n", "", "clip.scaled", "clip_grad_norm_"),
    ("language", "                scaler.scale(loss * world_size / count).backward()\n",
     "                scaler.scale(loss * world_size / count).backward()\n"
     "                nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)\n", "clip.local",
     "clip_grad_norm_(ddp.parameters()"),
    # --- replicas
    ("classifier", "F.cross_entropy(model(inputs)", "F.cross_entropy(model.module(inputs)", "replicas.unwrapped",
     "model.module(inputs), labels)"),
    ("stream", "torch.manual_seed(0)", "torch.manual_seed(rank)", "replicas.drift seeds here: 0, 1",
     "torch.manual_seed("),
    ("stream", "    torch.manual_seed(0)\n", "    torch.seed()\n", "replicas.drift no torch.manual_seed before",
     "optimizer.step()"),
    ("stream", "                dist.all_reduce(parameter.grad)\n", "", "replicas.drift after update",
     "optimizer.step()"),
    ("stream", ("                dist.all_reduce(parameter.grad)\n", "    dist.barrier()\n"), ("", ""),
     "replicas.alone", "optimizer.step()"),
    ("classifier", ("    model.eval()\n", "    model.train()\n"),
     ("    model.eval()\n    model.module[0].weight.data *= 1 + rank\n",
      "    model.train()\n    model.module[0].weight.data /= 1 + rank\n"), "replicas.drift when they evaluate",
     "model.module(inputs)"),
    ("classifier", "optim.SGD(model.parameters()", "optim.SGD(model.module[0].parameters()", "weights.not-stepped",
     "optimizer = "),
    ("classifier", "nn.Dropout(0.1)", "nn.Dropout(0.1), nn.BatchNorm1d(32)", "replicas.buffers",
     "model.module(inputs)"),
    ("sharded", "in model[::2]:", "in model[:3:2]:", "weights.uninitialised", "to_empty"),
    ("classifier", "lr=0.1,", "lr=0.1 * (1 + rank),", "replicas.rate", "optimizer.step()"),
    ("classifier", ("    model = DistributedDataParallel(model)\n", "model.module(inputs)"),
     ("    from torch.distributed.fsdp import FullyShardedDataParallel\n"
      "    model = FullyShardedDataParallel(model, device_id=torch.device('cpu'), use_orig_params=True,\n"
      "                                     ignored_modules=[model[3]])\n", "model(inputs)"),
     "replicas.drift next to sharded ones", "optimizer.step()"),
    *(("classifier", AVERAGE_PLACES, moving_average(frozen, "rank or "), f"replicas.drift {text}",
       "model.module(inputs)")
      for frozen, text in (("", "a second model, such as a moving average"),
                           (".requires_grad_(False)", "Sequential, which no optimizer trains"))),
    # --- evaluation
    ("classifier", "Subset(held_out, range(rank, len(held_out), world_size)), 5)",
     "held_out, 5, sampler=DistributedSampler(held_out, shuffle=False))", "eval.padded", "DataLoader(held_out"),
    # an indexed table and a selection of columns drop no samples
    ("classifier", ("Subset(held_out, range(rank, len(held_out), world_size)), 5)", "model.module(inputs)"),
     ("held_out, 5, sampler=DistributedSampler(held_out, shuffle=False))",
      "(model.module(inputs) + torch.zeros(99, 1)[labels])[:, :10]"), "eval.padded", "DataLoader(held_out"),
    ("classifier", "    dist.all_reduce(totals)\n", "", "eval.shard", "DataLoader(Subset"),
    ("classifier", "[loss * len(labels), hits, len(labels)]", "[loss, hits / len(labels), 1]", "eval.mean-of-means",
     "loss = F.cross_entropy(output"),
    # only the accuracy is wrong: 6 batches of 1 to 5 samples, with a sum and with a mean
    ("classifier", "hits, len(labels)]", "hits / len(labels) * 23 / 6, len(labels)]",
     "eval.mean-of-means means of", ".sum()"),
    ("classifier", ("hits = (output.argmax(1) == labels).sum()", "hits, len(labels)]"),
     ("hits = 100.0 * (output.argmax(1) == labels).float().mean()", "hits * 23 / 6, len(labels)]"),
     "eval.mean-of-means", ".mean()"),
    ("classifier", "    model.eval()\n", "", "eval.mode", "model.module(inputs)"),
    ("classifier", "world_size)), 5)", "world_size)), 5, drop_last=True)", "eval.dropped", "DataLoader(Subset"),
    ("classifier", "    dist.all_reduce(totals)\n    model.train()\n", "    dist.all_reduce(totals)\n", "train.mode",
     "model(inputs), labels"),
    ("classifier", "nn.Dropout(0.1)",
     'type("Noise", (nn.Module,), {"forward": lambda self, x: F.dropout(x, 0.1)})()', "eval.dropout",
     "model.module(inputs)"),
    ("classifier", "    dist.all_reduce(totals)\n",
     "    accuracy = totals[1] / totals[2]\n    dist.all_reduce(accuracy)\n    dist.all_reduce(totals)\n",
     "eval.averaged (12 and 11): ", "dist.all_reduce(accuracy)"),
    ("classifier", "    dist.all_reduce(totals)\n",
     "    percent = torch.tensor([(100.0 * (totals[1] / totals[2]).double()).item()], dtype=torch.float64)\n"
     "    dist.all_reduce(percent)\n    dist.all_reduce(totals)\n",
     "eval.averaged (12 and 11): ", "dist.all_reduce(percent)"),
    ("classifier", "    dist.all_reduce(totals)\n",
     "    perplexity = (totals[0] / totals[2]).exp()\n    dist.all_reduce(perplexity)\n    dist.all_reduce(totals)\n",
     "eval.averaged exponential", "dist.all_reduce(perplexity)"),
    ("classifier", "    dist.all_reduce(totals)\n",
     "    perplexity = torch.tensor(__import__('math').exp(totals[0] / totals[2]))\n"
     "    dist.all_reduce(perplexity)\n    dist.all_reduce(totals)\n",
     "eval.averaged exponential", "dist.all_reduce(perplexity)"),
    # --- the learning rate
    ("classifier", "            optimizer.step()\n",
     "            optimizer.step()\n            schedule.step(), schedule.step()\n", "schedule.often",
     "schedule.step()"),
    ("classifier", "            optimizer.step()\n",
     "            optimizer.step()\n            [schedule.step() for _ in range(3)]\n",
     "schedule.often steps 3 times per update, ", "schedule.step() for"),
    ("classifier", "        schedule.step()\n", "        [schedule.step() for _ in range(world_size)]\n",
     "schedule.often steps 2 times per epoch, once for each of the 2 ranks", "schedule.step() for"),
    ("classifier", ("CosineAnnealingLR(optimizer, 2)", "        schedule.step()\n"),
     ("ReduceLROnPlateau(optimizer, patience=0)",
      "        score = evaluate(model, held_out, rank, world_size)[0]\n"
      "        [schedule.step(score) for _ in range(world_size)]\n"),
     "schedule.often ReduceLROnPlateau steps 2 times with each metric value", "schedule.step(score)"),
    ("classifier", ("CosineAnnealingLR(optimizer, 2)", "        schedule.step()\n"),
     ("ReduceLROnPlateau(optimizer, patience=9)", "        schedule.step(loss.detach())\n"),
     "schedule.differs on rank 1 after update ", "schedule.step(loss"),
    # --- collectives
    ("stream", "            optimizer.zero_grad()\n",
     "            optimizer.zero_grad()\n"
     "            dist.all_reduce(torch.ones(1), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])\n",
     "collective.order", "dist.all_reduce(torch.ones("),
    ("stream", "            optimizer.zero_grad()\n",
     "            optimizer.zero_grad()\n"
     "            dist.broadcast(torch.ones(3, 2) if rank else torch.ones(2, 3).T, 0)\n",
     "collective.strides broadcast_ of float32[3, 2] between tensors with strides [1, 3] and [2, 1]",
     "dist.broadcast(torch.ones("),
    ("stream", "    if rank == 0:\n", "    if rank == 0:\n        dist.all_reduce(loss)\n    else:\n"
     "        open('hangs', 'w'), __import__('time').sleep(1000)\n    if rank == 0:\n",
     "collective.missing rank 1 was at ", "dist.all_reduce(loss)"),
    ("stream", ("                dist.all_reduce(parameter.grad)\n", "    dist.barrier()\n"),
     ("", "    dist.barrier() if rank else (open('hangs', 'w'), __import__('time').sleep(1000))\n"),
     "collective.one-rank", "dist.barrier()"),
    ("stream", "    dist.barrier()\n", "    open(f'hangs{rank}', 'w'), __import__('time').sleep(1000)\n", "run.hangs",
     "sleep(1000)"),
    # --- randomness
    ("classifier", "torch.manual_seed(100 + rank)", "torch.manual_seed(100)", "random.dropout",
     "model(inputs), labels"),
    ("stream", "torch.initial_seed() + dist.get_rank()", "torch.initial_seed()", "random.augment",
     "loader = DataLoader("),
    ("stream", "torch.initial_seed() + dist.get_rank()", "dist.get_rank()", "random.workers", "loader = DataLoader("),
    ("classifier", BEFORE_NOISE, ("sampler = DistributedSampler(train)\n    noise = torch.Generator().manual_seed(5)\n",
     "            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=noise)\n" + BEFORE_NOISE[1]),
     "random.noise seed 5 on each rank", "torch.randn(inputs.shape"),
    ("classifier", ("nn.Dropout(0.1)", "torch.manual_seed(100 + rank)"),
     ('type("Noise", (nn.Module,), {"forward": lambda self, x: x + torch.randn_like(x) * self.training})()',
      "torch.manual_seed(100)"), "random.noise seed 100 on each rank", "torch.randn_like(x)"),
    # --- saving
    ("classifier", "        if rank == 0:\n            print", "        if True:\n            print", "save.race",
     "torch.save("),
    ("classifier", ("        if rank == 0:\n            print", '}, "last.pt")'),
     ("        if True:\n            print", '}, open("last.pt", "wb"))'), "save.race", "torch.save("),
    ("language", "    dist.barrier()\n", "    if rank == 0:\n        torch.save("
     '{"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")\n    dist.barrier()\n',
     "save.scaler", "torch.save("),
    ("classifier", '"epoch": epoch}', '"loss": loss}', "save.schedule", "torch.save("),
    # --- speed
    ("classifier", "            loss.backward()\n", "            loss.backward()\n            loss.item()\n",
     "sync.item .item() waits for the device 1 times an update", "loss.item()"),
    ("classifier", "DistributedDataParallel(model)", "DistributedDataParallel(model, find_unused_parameters=True)",
     "ddp.find-unused", "find_unused"),
    ("language", "DistributedDataParallel(model)", "DistributedDataParallel(model, bucket_cap_mb=0.0001)",
     "ddp.buckets instead of 2", "bucket_cap_mb"),
    ("language", "contextlib.nullcontext() if is_last else ddp.no_sync()", "contextlib.nullcontext()",
     "sync.needless", "ddp(inputs)"),
]  # fmt: skip


SPLIT_LAYERS = (  # as in pipeline parallelism: all ranks read the same samples, and send a message at each update
    ("DistributedSampler(train)", "            optimizer.step()\n"),
    ("DistributedSampler(train, 1, 0)",
     "            optimizer.step()\n            (dist.recv if rank else dist.send)(torch.ones(1), 1 - rank)\n"),
)  # fmt: skip
# Findings of level NOTE, which are not mistakes. The columns are those of MUTATIONS.
REMARKS = [
    ("classifier", "7, sampler=sampler, drop_last=True", "3, sampler=sampler", "data.padded",
     "loader = DataLoader(train"),
    ("classifier", "sampler=sampler",
     "sampler=torch.utils.data.SubsetRandomSampler(range(rank, 60, world_size))", "data.skipped",
     "loader = DataLoader(train"),
    ("classifier", ("DistributedSampler(train)", "DataLoader(train, 7", "            loss = F.cross_entropy(model"),
     ("DistributedSampler(train, 1, 0)", "DataLoader(train, 8",
      "            inputs, labels = inputs[rank::world_size], labels[rank::world_size]\n"
      "            loss = F.cross_entropy(model"), "data.same share of each batch",
     "loader = DataLoader(train"),
    ("classifier", *SPLIT_LAYERS, "data.same layers are split", "loader = DataLoader(train"),
    ("classifier", *ENSEMBLE, "data.same draws its own random numbers", "loader = DataLoader(train"),
    ("classifier", (*ENSEMBLE[0], LOADER),
     (*ENSEMBLE[1], "    loader = [[t[i : i + 7] for t in data.tensors] for i in range(0, 98, 7)]\n"),
     "data.rows draw their own random numbers", "model(inputs)"),
    ("classifier", "            loss.backward()", "            (loss * 0.3).backward()",
     "gradient.scale perhaps a loss weight", "F.cross_entropy(model"),
    ("stream", ".square().mean()", ".square().sum()", "gradient.sum averaged over ranks", ".sum()"),
    ("classifier", "Subset(held_out, range(rank, len(held_out), world_size))", "held_out", "eval.everywhere",
     "DataLoader(held_out"),
    ("classifier", ("    dist.all_reduce(totals)\n", "evaluate(model, held_out, rank, world_size)\n"),
     ("", "evaluate(model, held_out, 0, 1) if rank == 0 else (0.0, 0.0)\n"), "eval.one-rank", "model.module(inputs)"),
    ("classifier", "7, sampler=sampler", "7, sampler=sampler, pin_memory=False",
     "loader.starves which has no workers", "loader = DataLoader(train"),
    ("classifier", "nn.Dropout(0.1)", "nn.Dropout(0.1), nn.BatchNorm1d(32)", "ddp.batchnorm", "model = Distributed"),
    ("stream", "                parameter.grad /= world_size\n",
     "                parameter.grad = (parameter.grad / world_size).half().float()\n", "gradient.unexplained",
     "optimizer.step()"),
]  # fmt: skip
# What the audit lists as not checked: (script, original text, replacement, start of the line)
NOT_CHECKED = [
    ("language", "", "", "samplers: "),
    ("stream", "", "", "the order of epochs: the data is a stream"),
    ("sharded", "for epoch in range(2)", "for epoch in range(1)", "the order of a second epoch: the script ended in"),
    ("language", "", "", "evaluation: "),
    ("stream", "", "", "checkpoints: "),
    ("classifier", *SPLIT_LAYERS, "gradients: layers are split over ranks"),
    ("stream", "            loss.backward()\n",
     "            for parameter in model.parameters():\n"
     "                parameter.grad = torch.ones_like(parameter)\n",
     "gradients: no update"),
    ("stream", ".square().mean()", ".square().logsumexp(0).squeeze()", "the weight of loss terms: no loss"),
    ("stream", "            loss = (model(inputs) - targets).square().mean()\n",
     "            loss = (model(inputs) - targets).square()\n"
     "            loss = loss.mean() if rank else loss.sum() / 10\n",
     "the weight of loss terms: "),
    ("classifier", ("Subset(held_out, range(rank, len(held_out), world_size)), 5)", "model.module(inputs)"),
     ("held_out, 5, sampler=DistributedSampler(held_out, shuffle=False))", "model.module(inputs)[:5]"),
     "whether repeated samples are counted"),
    ("classifier", "    dist.all_reduce(totals)\n",
     "    evaluate.count = getattr(evaluate, 'count', 20) + 5\n    number = totals[1] / evaluate.count\n"
     "    dist.all_reduce(number)\n    dist.all_reduce(totals)\n", "the ratio that is averaged at "),
    ("classifier", "= DistributedDataParallel(model)",
     '= type("DeepSpeedEngine", (DistributedDataParallel,), {})(model)', "gradients and replicas under DeepSpeed"),
    ("classifier", "= DistributedDataParallel(model)", "= DistributedDataParallel(nn.DataParallel(model))",
     "the replicas of DataParallel"),
    ("classifier", "= DistributedDataParallel(model)",
     "= DistributedDataParallel(model)\n"
     "    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
     "    model.register_comm_hook(None, fp16_compress_hook)", "gradients and replicas: a communication hook"),
    ("classifier", "= DistributedDataParallel(model)",
     "= DistributedDataParallel(torch.compile(torch.compile(mode='default')(model)._orig_mod)._orig_mod)",
     "torch.compile at "),
]  # fmt: skip
SETTINGS = {"sync.item": {"devices": 2}}  # the script waits for a GPU
# seconds of a step and of its wait for the loader, which replace the measured times
STEP_TIMES = {"loader.starves": (0.11, 0.1)}
RULES = Path(judge_rules.__file__).parent


@pytest.fixture(scope="session")
def get_record(python: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns text and record of a changed script. Each script runs only once."""
    record_by_change: dict[tuple[Any, ...], tuple[str, RecordedScript]] = {}

    def call(name: str, before: Any = "", after: Any = "", rule: str = "") -> tuple[str, RecordedScript]:
        rule_name = rule.partition(" ")[0]
        settings, step_times = SETTINGS.get(rule_name, {}), STEP_TIMES.get(rule_name)
        key = (name, before, after, repr(settings), repr(step_times))
        if key not in record_by_change:
            folder = tmp_path_factory.mktemp(name)
            text = text_with(name, before, after)
            (folder / "train.py").write_text(text)
            record_by_change[key] = text, record_forked_script(python, folder, folder / "train.py", **settings)
            if step_times is not None:
                record_by_change[key][1].write_times(*step_times)
        return record_by_change[key]

    return call


def text_with(name: str, before: Any, after: Any) -> str:
    """Return the text of a script after one or several replacements."""
    text = (SCRIPTS / f"{name}.py").read_text()
    pairs = zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)] if before else []
    for original, replacement in pairs:
        assert text.count(original) == 1, f"{name} has changed; {original!r} no longer fits"
        text = text.replace(original, replacement)
    return text


@pytest.mark.parametrize("name", CORRECT_SCRIPTS)
def test_correct_script_has_no_findings(get_record: Any, name: str) -> None:
    _, record = get_record(name)
    audit = record.judge()
    assert audit.findings == ()
    assert audit.updates >= 8
    assert not (Path(record.args[0]).parent / "last.pt").exists(), "the checkpoint of the script was not redirected"


def failures_and_warnings(audit: Audit) -> list[Finding]:
    """Return the findings of level FAIL and WARN."""
    return [finding for finding in audit.findings if finding.level != "NOTE"]


# correct variants: (script, original text, replacement)
CORRECT_VARIANTS = [
    (  # the norm of the gradients for a log, after the step
        "classifier",
        "            optimizer.step()\n",
        "            optimizer.step()\n            nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n",
    ),
    *(("classifier", AVERAGE_PLACES, moving_average(frozen)) for frozen in ("", ".requires_grad_(False)")),
    (  # the second optimizer steps with the gradients that are clipped after the step of the first
        "stream",
        ("SGD(model.parameters(), lr=0.05)\n", "optimizer.zero_grad()", "            optimizer.step()\n"),
        (
            "SGD(model[0].parameters(), lr=0.05)\n    second = torch.optim.SGD(model[2].parameters(), lr=0.05)\n",
            "model.zero_grad()",
            "            optimizer.step()\n"
            "            nn.utils.clip_grad_norm_(model[2].parameters(), 0.01)\n            second.step()\n",
        ),
    ),
    *(  # each rank has its own part of the data, even if one sample is in all parts
        (
            "classifier",
            ("torch.randn(124, 12)", LOADER, "        sampler.set_epoch(epoch)\n"),
            (f"torch.randn(124, 12).index_fill(0, torch.arange({same}), 0.0)", LOCAL_DATA.format(part=part), ""),
        )
        for same, part in ((0, "rank::2"), (0, "60 * rank : 60 + 60 * rank"), (2, "rank::2"))
    ),
    ("classifier", *ENSEMBLE),
    (  # split by hand
        "classifier",
        "DataLoader(train, 7, sampler=sampler, drop_last=True)",
        "DataLoader(Subset(train, range(rank, 100, world_size)), 7, shuffle=True)",
    ),
    (
        "classifier",
        "    dist.all_reduce(totals)\n",
        "    dist.all_reduce(totals[:2])\n    dist.all_reduce(totals[2:])\n",
    ),
    *(  # parts of one ratio; ratios with one count, or weighted by their counts; the maximum of ratios
        (
            "classifier",
            "    dist.all_reduce(totals)\n",
            f"    number = {number}\n    dist.all_reduce(number{operator})\n    dist.all_reduce(totals)\n",
        )
        for number, operator in (
            ("totals[1] / 23", ""),
            ("(totals[0] / 2).exp() / (totals[0] / 2).exp()", ""),
            ("totals[1] / totals[2] * (totals[2] / 23)", ""),
            ("totals[1] / totals[2] * (totals[2].item() / 23)", ""),
            ("totals[0] / (totals[0] * 0.5 + rank)", ""),
            ("totals[1] / totals[2]", ", dist.ReduceOp.MAX"),
        )
    ),
    (  # the schedule depends on a value of all ranks
        "classifier",
        ("CosineAnnealingLR(optimizer, 2)", "        schedule.step()\n"),
        (
            "ReduceLROnPlateau(optimizer, patience=0)",
            "        schedule.step(evaluate(model, held_out, rank, world_size)[0])\n",
        ),
    ),
    *(  # local noise of each rank, or noise drawn for all ranks of which each uses its part
        (
            "classifier",
            BEFORE_NOISE,
            (
                f"sampler = DistributedSampler(train)\n    noise = torch.Generator().manual_seed({seed})\n",
                f"            inputs = inputs + torch.{drawn}\n" + BEFORE_NOISE[1],
            ),
        )
        for seed, drawn in (
            ("5 + rank", "randn(inputs.shape, generator=noise)"),
            ("5", "randn(world_size, *inputs.shape, generator=noise)[rank]"),
            ("5", "rand(world_size * len(inputs), 12, generator=noise).chunk(world_size)[rank]"),
            ("5", "randn(len(inputs), 12 * world_size, generator=noise).narrow(1, 12 * rank, 12)"),
            ("5", "zeros(inputs.shape) + torch.randn(1, 12, generator=noise)"),
            ("5", "zeros(1) + inputs[torch.randint(0, len(inputs), (len(inputs),), generator=noise)]"),
        )
    ),
    (
        "classifier",
        "nn.Dropout(0.1)",
        'type("Noise", (nn.Module,), {"forward": lambda self, x: x + torch.randn_like(x) * self.training})()',
    ),
    ("flat", '"use_orig_params": False', '"use_orig_params": True'),
    (
        "flat",
        '"use_orig_params": False',
        '"sharding_strategy": torch.distributed.fsdp.ShardingStrategy.NO_SHARD',
    ),
    ("language", "loss * world_size / count", "loss / count * dist.get_world_size()"),
    ("stream", "parameter.grad /= world_size", "parameter.grad.div_(world_size)"),
    (  # views with the same strides on all ranks; a tensor with one row
        "stream",
        "            optimizer.zero_grad()\n",
        "            optimizer.zero_grad()\n"
        "            dist.broadcast(torch.ones(3, 2).T, 0)\n"
        "            dist.broadcast(torch.ones(1, 2) if rank else torch.ones(2, 1).T, 0)\n",
    ),
    (  # communication outside torch, as with Horovod and MPI
        "stream",
        ("                dist.all_reduce(parameter.grad)\n", "    dist.barrier()\n", "def main():\n"),
        (
            "                exchange(parameter.grad, rank)\n",
            "    exchange(torch.ones(1), rank)\n    exchange(torch.ones(1), rank) if rank == 0 else sent(rank)\n",
            "NUMBER = [0]\n\n\ndef sent(rank, values=()):\n    NUMBER[0] += 1\n"
            "    store = dist.distributed_c10d._get_default_store()\n"
            "    store.set(f'{NUMBER[0]} {rank}', ' '.join(map(repr, values)))\n    return store\n\n\n"
            "def exchange(grad, rank):\n    store = sent(rank, grad.flatten().tolist())\n"
            "    other = [float(text) for text in store.get(f'{NUMBER[0]} {1 - rank}').split()]\n"
            "    grad += torch.tensor(other or 1.0).view_as(grad)\n\n\ndef main():\n",
        ),
    ),
    (  # a custom batch sampler
        "classifier",
        "DataLoader(Subset(held_out, range(rank, len(held_out), world_size)), 5)",
        "DataLoader(held_out, batch_sampler=[[n] for n in range(rank, len(held_out), world_size)])",
    ),
]


@pytest.mark.parametrize(("name", "before", "after"), CORRECT_VARIANTS)
def test_correct_variant_has_no_findings(get_record: Any, name: str, before: Any, after: Any) -> None:
    _, record = get_record(name, before, after)
    assert failures_and_warnings(record.judge()) == []


def mutation_ids(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return a test id for each row."""
    return [f"{row[0]}-{row[3].partition(' ')[0]}-{index}" for index, row in enumerate(rows)]


@pytest.mark.parametrize(("name", "before", "after", "rule", "line"), MUTATIONS, ids=mutation_ids(MUTATIONS))
def test_mistake_is_found_with_its_line(
    get_record: Any, name: str, before: Any, after: Any, rule: str, line: str
) -> None:
    text, record = get_record(name, before, after, rule)
    finding = find_finding(record.judge(), rule, text, line)
    assert finding.level != "NOTE"
    assert finding.fix


def find_finding(audit: Audit, expected: str, text: str, line: str) -> Finding:
    """Return the finding of this rule, with these words, that names a line with this text."""
    rule, _, words = expected.partition(" ")
    matching_findings = [finding for finding in audit.findings if finding.rule == rule and words in finding.text]
    assert matching_findings, [(finding.level, finding.rule, finding.text) for finding in audit.findings]
    line_numbers = {int(location.rpartition(":")[2]) for location in matching_findings[0].lines}
    assert line_numbers.intersection(line_numbers_with(text, line)), (matching_findings, line)
    return matching_findings[0]


@pytest.mark.parametrize(("name", "before", "after", "rule", "line"), REMARKS, ids=mutation_ids(REMARKS))
def test_remark_is_a_note(get_record: Any, name: str, before: Any, after: Any, rule: str, line: str) -> None:
    text, record = get_record(name, before, after, rule)
    audit = record.judge()
    assert find_finding(audit, rule, text, line).level == "NOTE"


@pytest.mark.parametrize(("name", "before", "after", "message"), NOT_CHECKED)
def test_unchecked_property_is_listed(get_record: Any, name: str, before: Any, after: Any, message: str) -> None:
    """The audit has no finding in its place."""
    audit = get_record(name, before, after)[1].judge()
    assert any(line.startswith(message) for line in (*audit.unchecked, *audit.altered)), audit
    assert failures_and_warnings(audit) == []


# file of rules, or text of a finding: (test file, text in that file that shows the test)
TESTED_ELSEWHERE = {
    "replay.py": ("test_replay.py", "replay.batchnorm"),
    "split_layers.py": ("test_corpus.py", "loss_times_tensor_ranks"),
    "data.skipped": ("test_corpus.py", "stream_sharded_twice"),
    "gradient.lost": ("test_corpus.py", "gather_without_gradient"),
    "replicas.frozen": ("test_state_outside.py", "replicas.frozen"),
    "the gradient of the features gathered": ("test_corpus.py", "gradient of the features gathered"),
    "clip.norm": ("test_corpus.py", "replicated_counted_in_norm"),
    "which samples each rank": ("test_public_idioms.py", "which samples each rank"),
    "all samples of this dataset are equal": (
        "test_public_idioms.py",
        "test_equal_samples_of_dummy_data_have_no_findings",
    ),
    "the module is not part of the wrapped model": ("test_state_outside.py", "CenterLoss.center"),
}


@pytest.mark.parametrize(
    ("name", "before", "after", "is_refutable"),
    [("language", "if is_last else", "if index == 0 else", True), ("sharded", "index == 1", "index == 0", False)],
)
def test_equal_weights_on_all_ranks_cannot_be_refuted(
    get_record: Any, name: str, before: str, after: str, is_refutable: bool
) -> None:
    """A single rank would weigh its backwards in the same way, so comparing with one rank cannot refute the finding."""
    findings = get_record(name, before, after, "gradient.weights")[1].judge().findings
    assert [finding.refuted_if_equal_to_one_rank for finding in findings if finding.rule == "gradient.weights"] == [
        is_refutable
    ]


def test_each_finding_of_the_rules_is_tested(get_record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script above reaches every call in the rules that adds a finding, or that lists an unchecked property.

    Files in `TESTED_ELSEWHERE` test the others.
    """
    reached_calls: set[tuple[str, int]] = set()

    def record_caller(function: Any) -> Any:
        def call(self: Findings, *arguments: Any, **named: Any) -> None:
            caller = sys._getframe(1)
            reached_calls.add((Path(caller.f_code.co_filename).name, caller.f_lineno))
            function(self, *arguments, **named)

        return call

    for name in ("add", "add_unchecked"):
        monkeypatch.setattr(Findings, name, record_caller(getattr(Findings, name)))
    for row in [*MUTATIONS, *REMARKS, *NOT_CHECKED]:
        get_record(*row[:4])[1].judge()
    calls = {
        (path.name, node.lineno): ast.unparse(node)[:90]
        for path in RULES.glob("*.py")
        if path.name not in TESTED_ELSEWHERE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("findings.add", "findings.add_unchecked")
        if not any(kind in ast.unparse(node) for kind in TESTED_ELSEWHERE)
    }
    assert len(calls) > 50
    for file_name, text_in_file in TESTED_ELSEWHERE.values():
        assert text_in_file in Path(__file__).with_name(file_name).read_text()
    assert {location: text for location, text in calls.items() if location not in reached_calls} == {}
