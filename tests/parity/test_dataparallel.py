"""dataparallel with local batch norm is compared with its simulation. torch's replicas run on the CPU.

No test machine has two CUDA devices. `OnCpu` is our class with torch's own forward and replicas.
Only the copies to other devices are replaced by clones.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from everyrank import parse_layout
from everyrank.errors import CannotRunError
from everyrank.loop import open_data
from everyrank.parity import check_layout, parity_case
from everyrank.record import Parity
from everyrank.strategies import dataparallel, prepare
from everyrank.strategies.simulated import ranks as simulated
from everyrank.world import World

REPLICATE = sys.modules["torch.nn.parallel.replicate"]


class OnCpu(dataparallel.OverDevices):
    """DataParallel over fake devices. The first one has the module, as on CUDA."""

    def __init__(self, module: nn.Module, device_ids: list[int], output_device: int) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = module, device_ids, output_device, 0
        self.src_device_obj = torch.device("cpu")

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return [replica(*args) for replica, args in zip(replicas, inputs, strict=True)]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat(list(outputs))


def copies(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
    """Return the tensors for the first device, and differentiable clones for the others."""
    return [tensors, *([tensor.clone() for tensor in tensors] for _ in devices[1:])] if tensors else []


def check(world: World, key: str, name: str, num_devices: int, keys: str = "", is_mutated: bool = False) -> Parity:
    """Return the parity of dataparallel. If `is_mutated`, the simulation has a mistake."""
    workload = zoo.workload(name, "sgd", global_batch=10, drop_last=True)
    case = parity_case(workload, *open_data(workload, world), steps=6)
    layout = parse_layout(f"dataparallel:batch_norm=local{keys}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataparallel, "OverDevices", OnCpu)
        patch.setattr(REPLICATE, "_broadcast_coalesced_reshape", copies)
        patch.setattr(REPLICATE, "_get_device_index", lambda device, _: device)
        patch.setattr(dataparallel, "_devices", lambda *_: list(range(num_devices)))
        patch.setattr(torch.cuda, "device_count", lambda: num_devices)
        if is_mutated:  # every simulated device updates the running statistics
            original = simulated.rank_gradients
            patch.setattr(simulated, "rank_gradients", lambda *args: original(*args[:3], True))
        return check_layout(case, layout, world, key)[0]


@pytest.mark.parametrize(("num_devices", "keys"), [(2, ""), (3, ""), (2, ",accumulate=2")])
def test_batch_norm_of_each_device_is_compared_with_its_simulation(ranks: Any, num_devices: int, keys: str) -> None:
    """With 3 devices, torch would split 10 samples as 4, 4 and 2."""
    [parity] = ranks(1, check, f"dataparallel/{num_devices}{keys}", "norm", num_devices, keys)
    assert parity.status == "equal", parity
    assert "simulation" in (parity.scope or "")


def test_mutated_simulation_is_different(ranks: Any) -> None:
    assert ranks(1, check, "dataparallel/broken", "norm", 2, "", True)[0].status == "different"


def test_number_of_devices_has_to_be_the_number_of_processes(ranks: Any) -> None:
    assert "--processes 2" in ranks(3, refusal)[0]


def refusal(world: World) -> str:
    """Return the message on 3 ranks with 2 visible devices. Two devices are not equivalent to three ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        world = dataclasses.replace(world, device=torch.device("cuda", 0))
        with pytest.raises(CannotRunError) as caught:
            prepare(zoo.workload("norm"), parse_layout("dataparallel:batch_norm=local"), world)
    return str(caught.value)
