"""Calls that are valid without an audit are valid under its hooks, and return the same."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from processes import Cli

HEADER = """
import dataclasses, os, pickle, random, sys, traceback
import numpy as np, torch, torch.distributed
from torch import nn

"""
TRAINING = """
failed = []
for name, function in calls.items():
    try:
        function()
    except BaseException:
        failed.append((name, traceback.format_exc()[-300:]))

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
assert not failed, failed
"""

CALLS = {
    "random.seed(a=...)": "random.seed(a=7); assert random.random() == random.Random(7).random()",
    "seeds by keyword": "np.random.seed(seed=7); torch.manual_seed(seed=7)",
    "pickled functions": """
        for function in (random.seed, random.shuffle, np.random.seed, torch.manual_seed, torch.randperm):
            assert pickle.loads(pickle.dumps(function)) is function
    """,
    "TorchScript": """
        def draw(n: int):
            torch.manual_seed(n)
            return torch.randperm(n)
        assert torch.jit.script(draw)(5).sort().values.tolist() == [0, 1, 2, 3, 4]
    """,
    "backward(tensors=...)": """
        weight = torch.ones(2, requires_grad=True)
        torch.autograd.backward(tensors=[(3 * weight).sum()]); assert weight.grad.tolist() == [3, 3]
    """,
    "scaler.update(new_scale=...)": """
        scaler = torch.amp.GradScaler("cpu"); scaler.scale(torch.ones(1)); scaler.update(new_scale=4.0)
        assert scaler.get_scale() == 4
    """,
    "higher-order operators": """
        class Twice(torch._ops.HigherOrderOperator):  # as flex_attention, which takes longer to import
            def __call__(self, function, value):
                return super().__call__(function, value)
        twice = Twice("twice")
        twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda function, value: function(function(value)))
        twice.fallthrough(torch._C.DispatchKey.AutogradCPU)
        assert twice(lambda value: value + 1, torch.ones(1)).item() == 3
    """,
    "a bit generator of numpy": """
        np.random.set_bit_generator(np.random.PCG64(1))
        data = torch.utils.data.TensorDataset(torch.ones(4, 2))
        assert len([batch for batch in torch.utils.data.DataLoader(data, batch_size=2)]) == 2
    """,
    "to_empty(recurse=False)": """
        outer = nn.Linear(2, 2); outer.inner = nn.Linear(2, 2); outer.to_empty(device="cpu", recurse=False)
        assert not outer.inner.weight.isnan().any()
    """,
    "lazy parameters": "nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))(torch.ones(4, 2)).sum().backward()",
    "a dataclass with slots": """
        class Model(nn.Linear):
            def forward(self, batch):
                return super().forward(batch.features)
        Batch = dataclasses.make_dataclass("Batch", ["features"], slots=True)
        Model(2, 1)(Batch(torch.ones(4, 2))).sum().backward()
    """,
    "tensors by keyword": """
        output = nn.Linear(2, 1)(torch.ones(4, 2))
        torch.div(input=torch.mean(input=output), other=torch.tensor(2.0)).backward()
        with torch.no_grad():
            nn.Linear(2, 1)(torch.ones(4, 2)); torch.mean(input=torch.ones(4)); torch.div(torch.ones(1), other=2.0)
        nn.Linear(2, 1)(torch.ones(4, 2))
    """,
    "complex numbers": """
        import warnings
        with warnings.catch_warnings(action="error"):
            nn.Linear(2, 1, dtype=torch.cfloat)(torch.randn(4, 2, dtype=torch.cfloat).conj()).abs().sum().backward()
    """,
    "the state of a schedule": """
        schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 1)
        assert not [name for name in schedule.state_dict() if "audit" in name]
    """,
    "an object in sys.modules": """
        class Options(dict):
            __getattr__ = dict.__getitem__
        sys.modules["options"] = Options()
    """,
}

CUDA_CALLS = {
    "seeds": "torch.cuda.manual_seed(1); torch.cuda.manual_seed_all(1); torch.cuda.seed(); torch.cuda.initial_seed()",
    "random states": "torch.cuda.set_rng_state_all([torch.cuda.get_rng_state()])",
    "memory": """
        torch.cuda.set_per_process_memory_fraction(0.5); torch.cuda.reset_max_memory_allocated()
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0 and torch.cuda.memory_summary() == ""
        torch.cuda.memory._record_memory_history(max_entries=10); torch.cuda.memory._dump_snapshot("memory.pickle")
    """,
    "streams": """
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.ones(2).cuda().record_stream(torch.cuda.current_stream()); torch.cuda.set_sync_debug_mode(1)
    """,
    "profiler": """
        torch.cuda.profiler.start(); torch.cuda.profiler.stop(); torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("update"))
    """,
    "properties": "assert torch.cuda.get_device_properties(0).max_threads_per_multi_processor > 0",
    "default device": """
        torch.set_default_device("cuda"); assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
        torch.set_default_device(torch.device("cuda", 0)); torch.zeros(1); torch.set_default_device(None)
    """,
    "pinned memory": "assert torch.empty(3, pin_memory=True).shape == (3,)",
    "map_location": """
        path = f"cpu{os.environ['RANK']}.pt"; torch.save(torch.ones(2), path)
        for location in (lambda storage, place: storage.cuda(0), "cuda:0", {"cuda:0": "cuda:1"}, None):
            assert torch.load(path, map_location=location).tolist() == [1, 1]
        torch.load(path, "cuda", pickle, weights_only=False)
    """,
    "the file of a GPU": """
        from unittest import mock
        with mock.patch.object(torch.serialization, "location_tag", lambda storage: "cuda:0"):
            torch.save(torch.ones(2), f"gpu{os.environ['RANK']}.pt")
        assert torch.load(f"gpu{os.environ['RANK']}.pt").tolist() == [1, 1]
    """,
    "an average for one rank": """
        torch.distributed.init_process_group("nccl")
        rank = torch.distributed.get_rank(); value = torch.tensor([1.0 + rank])
        torch.distributed.reduce(value, 0, op=torch.distributed.ReduceOp.AVG)
        assert value.item() == (1.5 if rank == 0 else 2)
    """,
}


@pytest.mark.parametrize(("calls", "size"), [(CALLS, 1), (CUDA_CALLS, 2)], ids=["CPU", "pretended GPUs"])
def test_valid_calls_do_not_raise(calls: dict[str, str], size: int, cli: Cli, tmp_path: Path) -> None:
    functions = [
        f"def calls_{number}():\n{textwrap.indent(textwrap.dedent(code).strip(), '    ')}\n"
        for number, code in enumerate(calls.values())
    ]
    table = ", ".join(f"{name!r}: calls_{number}" for number, name in enumerate(calls))
    (tmp_path / "train.py").write_text(f"{HEADER}{''.join(functions)}calls = {{{table}}}\n{TRAINING}")
    result = cli(tmp_path, "audit", "--no-compare", "--json", "found.json", "--processes", size, "train.py")
    assert result.status == 0, result.out + result.err
    not_checked = json.loads((tmp_path / "found.json").read_text())["not_checked"]
    assert [line for line in not_checked if "a hook of everyrank failed" in line] == []
