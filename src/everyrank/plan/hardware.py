"""GPU kinds, links and clusters: numbers with their source, most from data sheets."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everyrank.errors import UsageError
from everyrank.launch import host_memory_bytes

__all__ = [
    "GIB",
    "GPUS",
    "PCIE3",
    "PCIE4",
    "Cluster",
    "Gpu",
    "Link",
    "find_gpu",
    "host_cluster",
    "parse_bytes",
    "parse_cluster",
    "parse_link",
    "parse_published_link",
]

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    memory      bytes that torch reports as total capacity: less than on the data sheet, because ECC and the driver
                use some
    flops       dense 16-bit tensor-core operations a second (bf16; fp16 if a kind has no bf16)
    flops_tf32  the same for float32 matrix multiplications with TF32; plain float32 if a kind has no TF32
    flops_fp8   the same for 8-bit floats; 0 if a kind does not support them
    flops_fp32  the same for float32 matrix multiplications without TF32 (torch's default)
    hbm         bytes a second between the chip and its memory
    units       streaming multiprocessors (compute units on AMD)
    watts       thermal design power
    inside      links between the GPUs of one node, by default
    across      links between nodes, by default
    source      where the numbers are from
    """

    name: str
    memory: float
    flops: float
    flops_tf32: float
    flops_fp8: float
    flops_fp32: float
    hbm: float
    units: int
    watts: float
    inside: Link
    across: Link
    source: str

    def links_of_node(self, per_node: int) -> Link:
        """Return the link inside a node of `per_node` GPUs.

        `by_ranks` describes full nodes of eight GPUs (V100, P100). In smaller nodes, all groups get the full bandwidth.
        """
        return replace(self.inside, by_ranks=()) if per_node < len(self.inside.by_ranks) else self.inside

    @property
    def attention_efficiency(self) -> float:
        """Share of `flops` that FlashAttention-2 reaches over forward and backward with heads of 128.

        FlashAttention-2 uses no feature that is new in Hopper or Blackwell. On an H100 it reaches at most 335 of 989
        Tflop/s forward. If a unit does more than 4 Tflop/s, softmax is the bottleneck. Source: Dao 2023, figures 4-7.
        """
        return 0.30 if self.flops > 4e12 * self.units else 0.55


@dataclass(frozen=True)
class Link:
    """A connection between GPUs.

    latency    seconds per hop
    bandwidth  bytes a second of one GPU: bus bandwidth, as nccl-tests defines it
    start      additional seconds of each collective, independent of its size and ranks
    by_ranks   share of the bandwidth that groups of 1, 2, 3, ... ranks reach, if GPUs are wired unequally
    """

    latency: float
    bandwidth: float
    name: str = ""
    start: float = 0.0
    by_ranks: tuple[float, ...] = ()

    def group_bandwidth(self, ranks: Any) -> Any:
        """Return the bandwidth of a group of ranks."""
        if not self.by_ranks:
            return self.bandwidth
        return self.bandwidth * np.interp(ranks, np.arange(len(self.by_ranks)) + 1, self.by_ranks)


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs of one kind, `per_node` in each node."""

    gpu: Gpu
    gpus: int
    per_node: int
    inside: Link
    across: Link

    def as_json(self) -> dict[str, Any]:
        """Return the cluster as it is in the JSON output of plan; docs/plan.md describes the fields."""
        return {
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "per_node": self.per_node,
            "memory_bytes": self.gpu.memory,
            "inside": self.inside.name,
            "across": self.across.name,
            "source": self.gpu.source,
        }


# Bus bandwidths of all-reduce. Those of NVLink 2 and 3 are fitted to measurements of eth-easl/sailor (errors in
# benchmarks/records/plan-links.json), and only they have a `start`. Those of NVLink 4 and 5 are published results of
# nccl-tests on HGX boards. The others are estimates from the rates of data sheets.
# A link of 400 Gb/s carries 50e9 bytes a second, of which NCCL gets 96%.
# Eight V100 have no NVSwitch, so the rings of a group depend on the wires between its members.
_CUBE_MESH = (0.167, 0.167, 0.335, 0.635, 0.276, 0.340, 0.647, 1.0)
_NVLINK2 = Link(4.75e-6, 138.5e9, "NVLink 2", 16e-6, _CUBE_MESH)
_NVLINK3 = Link(2.75e-6, 230e9, "NVLink 3", 39e-6)
_NVLINK_A800 = Link(6.5e-6, 160e9, "NVLink of 400 GB/s")
_NVLINK4 = Link(6e-6, 370e9, "NVLink 4")
_NVLINK5 = Link(6e-6, 680e9, "NVLink 5")
_GH200 = Link(8e-6, 150e9, "NVLink between GH200")
_FABRIC_MI250X = Link(8e-6, 70e9, "Infinity Fabric 3")
_FABRIC_MI355X = Link(8e-6, 350e9, "Infinity Fabric 4")
_FABRIC_MI300X = Link(8e-6, 300e9, "Infinity Fabric")
PCIE3 = Link(10e-6, 10e9, "PCIe 3")
PCIE4 = Link(10e-6, 20e9, "PCIe 4")
_PCIE5 = Link(10e-6, 40e9, "PCIe 5")
_100G = Link(12e-6, 12e9, "100 Gb/s")
_200G = Link(12e-6, 24e9, "200 Gb/s")
_400G = Link(12e-6, 48e9, "400 Gb/s")

_NV = "NVIDIA data sheet"
_MINUS_DRIVER = "memory: data sheet, minus an estimate for the driver"
_CAPACITY = "memory: total capacity in torch's out-of-memory messages"


def _gpu(
    name: str,
    gib: float,
    tflops: tuple[float, float, float, float],
    hbm_tb_per_second: float,
    units: int,
    watts: float,
    links: tuple[Link, Link],
    source: str,
) -> Gpu:
    """Make a `Gpu` from the units of data sheets: operations as (16-bit, TF32, fp8, float32), dense, in Tflop/s."""
    flops, flops_tf32, flops_fp8, flops_fp32 = (1e12 * value for value in tflops)
    inside, across = links
    rates = flops, flops_tf32, flops_fp8, flops_fp32
    return Gpu(name, gib * GIB, *rates, hbm_tb_per_second * 1e12, units, watts, inside, across, source)


_NVLINK2_LINKS, _NVLINK3_LINKS = (_NVLINK2, _100G), (_NVLINK3, _200G)
_NVLINK4_LINKS, _NVLINK5_LINKS = (_NVLINK4, _400G), (_NVLINK5, _400G)
_B200 = "hbm and total capacity: pytorch/ao#4002, measured; else NVIDIA data sheet"
_H100_500W = (
    "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; operations: estimated as 0.85 of the H100 SXM, because "
    "this GPU is limited to 500 W"
)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100_16gb", 15.77, (125, 15.7, 0, 15.7), 0.9, 80, 300, _NVLINK2_LINKS, f"{_NV} V100; {_CAPACITY}"),
        _gpu("v100_32gb", 31.74, (125, 15.7, 0, 15.7), 0.9, 80, 300, _NVLINK2_LINKS, f"{_NV} V100; {_CAPACITY}"),
        _gpu("t4", 14.75, (65, 8.1, 0, 8.1), 0.32, 40, 70, (PCIE3, _100G), f"{_NV} T4; {_CAPACITY}"),
        _gpu("a10", 22.06, (125, 62.5, 0, 31.2), 0.6, 72, 150, (PCIE4, _100G), f"{_NV} A10; {_CAPACITY}"),
        # same memory as A10, but about half of its tensor operations
        _gpu("a10g", 22.06, (70, 35, 0, 35), 0.6, 80, 300, (PCIE4, _100G), f"{_NV} A10G; {_CAPACITY}"),
        _gpu("a100_40gb", 39.39, (312, 156, 0, 19.5), 1.555, 108, 400, _NVLINK3_LINKS, f"{_NV} A100; {_CAPACITY}"),
        _gpu("a100_80gb", 79.15, (312, 156, 0, 19.5), 2.039, 108, 400, _NVLINK3_LINKS, f"{_NV} A100; {_CAPACITY}"),
        _gpu("a100_40gb_pcie", 39.39, (312, 156, 0, 19.5), 1.555, 108, 250, (PCIE4, _200G), f"{_NV} A100; {_CAPACITY}"),
        _gpu("a100_80gb_pcie", 79.15, (312, 156, 0, 19.5), 1.935, 108, 300, (PCIE4, _200G), f"{_NV} A100; {_CAPACITY}"),
        _gpu("l4", 22.03, (121, 60, 242, 30.3), 0.3, 58, 72, (PCIE4, _100G), f"{_NV} L4; {_CAPACITY}"),
        _gpu(
            "rtx4090", 23.65, (165, 82.6, 330, 82.6), 1.008, 128, 450, (PCIE4, _100G), f"NVIDIA Ada paper; {_CAPACITY}"
        ),
        _gpu("l40s", 44.3, (362, 183, 733, 91.6), 0.864, 142, 350, (PCIE4, _200G), f"{_NV} L40S; {_CAPACITY}"),
        _gpu("h100_80gb", 79.1, (989, 494.5, 1979, 67), 3.35, 132, 700, _NVLINK4_LINKS, f"{_NV} H100 SXM; {_CAPACITY}"),
        _gpu("h100_80gb_pcie", 79.1, (756, 378, 1513, 51), 2.0, 114, 350, (_PCIE5, _200G), f"{_NV} H100; {_CAPACITY}"),
        _gpu(
            "h100_94gb_nvl", 93.1, (835, 417, 1671, 60), 3.9, 132, 400, (_PCIE5, _400G), f"{_NV} H100 NVL; {_CAPACITY}"
        ),
        _gpu("h100_96gb_hbm2e_500w", 95.0, (840, 420, 1680, 57), 2.4, 132, 500, _NVLINK4_LINKS, _H100_500W),
        _gpu(
            "a800_80gb",
            79.15,
            (312, 156, 0, 19.5),
            2.039,
            108,
            400,
            (_NVLINK_A800, _200G),
            f"A100 with NVLink limited to 400 GB/s; {_CAPACITY}",
        ),
        _gpu(
            "h800_80gb",
            79.1,
            (989, 494.5, 1979, 67),
            3.35,
            132,
            700,
            (_NVLINK_A800, _400G),
            f"H100 with NVLink limited to 400 GB/s; {_CAPACITY}",
        ),
        _gpu(
            "a6000",
            47.5,
            (155, 77.5, 0, 38.7),
            0.768,
            84,
            300,
            (PCIE4, _100G),
            f"{_NV} RTX A6000; {_MINUS_DRIVER}",
        ),
        _gpu("h200", 139.7, (989, 494.5, 1979, 67), 4.8, 132, 700, _NVLINK4_LINKS, f"{_NV} H200; {_CAPACITY}"),
        _gpu("h200_nvl", 139.7, (835, 417, 1671, 60), 4.8, 132, 600, (_PCIE5, _400G), f"{_NV} H200 NVL; {_CAPACITY}"),
        _gpu("gh200_96gb", 94.5, (989, 494.5, 1979, 67), 4.0, 132, 900, (_GH200, _200G), f"{_NV} GH200; {_CAPACITY}"),
        _gpu("b200", 178.35, (2250, 1125, 4500, 75), 7.672, 148, 1000, _NVLINK5_LINKS, _B200),
        _gpu(
            "gb200",
            184.0,
            (2500, 1250, 5000, 80),
            7.672,
            148,
            1200,
            _NVLINK5_LINKS,
            f"{_NV} GB200; memory: 186 GB, minus an estimate for the driver",
        ),
        _gpu(
            "p100",
            15.9,
            (21.2, 10.6, 0, 10.6),
            0.732,
            56,
            300,
            _NVLINK2_LINKS,
            f"{_NV} P100 (no tensor cores); {_CAPACITY}",
        ),
        _gpu(
            "rtx3090", 23.69, (71, 35.6, 0, 35.6), 0.936, 82, 350, (PCIE4, _100G), f"NVIDIA Ampere paper; {_CAPACITY}"
        ),
        _gpu(
            "rtx5090",
            31.36,
            (209.5, 104.8, 419, 104.8),
            1.792,
            170,
            575,
            (_PCIE5, _100G),
            f"NVIDIA Blackwell paper; {_MINUS_DRIVER}",
        ),
        _gpu("a40", 44.4, (149.7, 74.8, 0, 37.4), 0.696, 84, 300, (PCIE4, _200G), f"{_NV} A40; {_MINUS_DRIVER}"),
        _gpu("l40", 44.4, (181, 90.5, 362, 90.5), 0.864, 142, 300, (PCIE4, _200G), f"{_NV} L40; {_MINUS_DRIVER}"),
        _gpu(
            "rtx6000ada",
            47.4,
            (364, 182, 728, 91.1),
            0.96,
            142,
            300,
            (PCIE4, _100G),
            f"{_NV} RTX 6000 Ada; {_MINUS_DRIVER}",
        ),
        _gpu("h20", 94.9, (148, 74, 296, 44), 4.0, 78, 400, _NVLINK4_LINKS, f"{_NV} H20; {_MINUS_DRIVER}"),
        _gpu("b300", 267.0, (2250, 1125, 4500, 75), 8.0, 148, 1100, _NVLINK5_LINKS, f"{_NV} HGX B300; {_MINUS_DRIVER}"),
        _gpu("gb300", 267.0, (2500, 1250, 5000, 80), 8.0, 148, 1400, _NVLINK5_LINKS, f"{_NV} GB300; {_MINUS_DRIVER}"),
        _gpu(
            "mi250x",
            63.9,
            (191.5, 47.9, 0, 47.9),
            1.638,
            110,
            280,
            (_FABRIC_MI250X, _200G),
            "AMD data sheet MI250X, one of its two dies",
        ),
        _gpu(
            "mi325x", 255.5, (1307, 653, 2614, 163.4), 6.0, 304, 1000, (_FABRIC_MI300X, _400G), "AMD data sheet MI325X"
        ),
        _gpu(
            "mi355x", 287.5, (2516, 1258, 5033, 157.3), 8.0, 256, 1400, (_FABRIC_MI355X, _400G), "AMD data sheet MI355X"
        ),
        _gpu(
            "mi300x", 191.5, (1307, 653, 2614, 163.4), 5.3, 304, 750, (_FABRIC_MI300X, _400G), "AMD data sheet MI300X"
        ),
    )
}
"""GPU kinds by name. `source` gives the origin of the numbers; most are from data sheets."""

_ALIASES = {
    "v100": "v100_32gb",
    "a100": "a100_80gb",
    "a100_sxm": "a100_80gb",
    "a100_pcie": "a100_80gb_pcie",
    "a100_pcie_40gb": "a100_40gb_pcie",
    "rtx_a6000": "a6000",
    "h100": "h100_80gb",
    "h800": "h800_80gb",
    "h100_sxm": "h100_80gb",
    "h100_pcie": "h100_80gb_pcie",
    "h100_nvl": "h100_94gb_nvl",
    "h200_sxm": "h200",
    "h200_141gb": "h200",
    "gh200": "gh200_96gb",
    "b200_sxm": "b200",
    "b200_180gb": "b200",
    "gh200_480gb": "gh200_96gb",
    "3090": "rtx3090",
    "rtx_3090": "rtx3090",
    "5090": "rtx5090",
    "rtx_5090": "rtx5090",
    "rtx_6000_ada": "rtx6000ada",
    "mi250": "mi250x",
    "4090": "rtx4090",
    "rtx_4090": "rtx4090",
    "a800": "a800_80gb",
    "h100_96gb": "h100_96gb_hbm2e_500w",
}
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
}


def find_gpu(name: str) -> Gpu:
    """Return a kind of GPU by name: `h100`, `A100-80GB-PCIe`, or as CUDA names it: `Tesla V100-SXM2-16GB`.

    Raises `UsageError` with the nearest names.
    """
    key = re.sub(r"[-\s]+", "_", name.strip().lower())
    key = re.sub(r"^(nvidia_|amd_)?(tesla_|geforce_|quadro_|instinct_)?", "", key).removesuffix("_generation")
    plain = re.sub(r"_(sxm\d?|hbm\d\w?|nvl\d*)(?=_|$)", "", key)
    names = [key, plain, re.sub(r"_\d+gb$", "", key)]
    for candidate in [*names, re.sub(r"_(sxm\d?)?(_?\d+gb)?$", "", key)]:
        name_in_table = _ALIASES.get(candidate, candidate)
        if name_in_table in GPUS and (candidate == key or _has_same_memory(key, GPUS[name_in_table])):
            return GPUS[name_in_table]
    close = difflib.get_close_matches(key, [*GPUS, *_ALIASES], 2, 0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(GPUS)}"
    raise UsageError(f"--gpus: no GPU {name!r}; {hint}")


def _has_same_memory(key: str, gpu: Gpu) -> bool:
    """Return whether the memory size in a name (`80gb`), if it has one, is that of the GPU."""
    match = re.search(r"_(\d+)gb", key)
    return match is None or abs(float(match[1]) * 1e9 / gpu.memory - 1) < 0.1


def parse_bytes(text: str, flag: str) -> float:
    """Return the bytes of `80GiB`, `80GB` or `80`; a plain number is GiB. Raises `UsageError`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?b)?", text.strip().lower())
    size = float(match[1]) * (_UNITS[match[2]] if match[2] else GIB) if match else 0.0
    if not 0 < size < 2**60:
        raise UsageError(f"{flag} {text}: give a size above 0, such as 80GiB")
    return size


def parse_link(text: str) -> Link:
    """Return the link of `400Gb` (bits a second for each GPU) or `50GB` (bytes). Raises `UsageError`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(Gb|Gbit|Gbps|GB)(?:/s)?", text.strip())
    rate = float(match[1]) * (1.0 if match[2] == "GB" else 0.125) * 1e9 if match else 0.0
    if not 0 < rate < 1e14:
        number = re.match(r"[0-9.]+", text.strip())
        hint = f"did you mean {number[0]}Gb (bits a second) or {number[0]}GB (bytes)? " if number else ""
        raise UsageError(
            f"--link {text}: {hint}give the rate of one GPU, such as 400Gb or 50GB, or a file "
            "written by everyrank comm --json"
        )
    return Link(12e-6, 0.96 * rate, text.strip())


def host_cluster(device: str, ranks: int, memory: float | None = None) -> Cluster:
    """Return this host as a cluster with one rank per device, each with `memory` bytes (default: what it has).

    For a CPU only the memory is real. The other numbers are placeholders.
    """
    if device != "cpu":
        gpu = find_gpu(device)
        gpu = replace(gpu, memory=memory or gpu.memory)
        return Cluster(gpu, ranks, ranks, gpu.links_of_node(ranks), gpu.across)
    memory = memory or host_memory_bytes() / ranks
    link = Link(0.0, 1.0, "measured")
    return Cluster(
        Gpu("cpu", memory, 1.0, 1.0, 0.0, 1.0, 1.0, 1, 0.0, link, link, "this host"), ranks, ranks, link, link
    )


_INFINIBAND = {"fdr": 56, "edr": 100, "hdr100": 100, "hdr": 200, "ndr200": 200, "ndr": 400, "xdr": 800}


def parse_published_link(value: Any, per_node: int) -> Link | None:
    """Return the link of one GPU from the network of a published measurement; None if it has no rate.

    Such a network is `1600 Gbps/node RoCE` or `8x HDR`. By default the rate is for one GPU. The GPUs of a node share it
    if the text has `/node`, a number of network cards (`8x`), Tb/s or Ethernet, but not `/gpu`.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Link(12e-6, 0.12e9 * value, f"{value:g} Gb/s") if 0 < value < 1e5 else None
    text = str(value or "")
    lower = text.lower()
    match = re.search(r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*([TG])(i?B|b|bit)(?=ps|/s|e\b|E\b|\b)", text)
    if match:
        rate = float(match[2]) * (1000 if match[3] == "T" else 1) * (8 if match[4].endswith("B") else 1)
        is_shared = match[1] is not None or match[3] == "T" or "ethernet" in lower or "gbe" in lower
    else:
        match = re.search(r"(?:(\d+)\s*[x×]\s*)?\b(fdr|edr|hdr100|hdr|ndr200|ndr|xdr)", lower)
        if match is None:
            return None
        rate, is_shared = float(_INFINIBAND[match[2]]), match[1] is not None
    is_per_gpu = re.search(r"(a|per|/)\s*gpu", lower) is not None
    is_shared = not is_per_gpu and (is_shared or re.search(r"(a|per|/)\s*node", lower) is not None)
    rate *= int(match[1] or 1) / (per_node if is_shared else 1)
    return Link(12e-6, 0.12e9 * rate, f"{rate:g} Gb/s") if 0 < rate < 1e5 else None


def parse_cluster(
    text: str, per_node: int | None = None, link: Link | None = None, memory: float | None = None
) -> Cluster:
    """Return the cluster of `64xh100`. Raises `UsageError` for no GPUs, too many, or an unknown kind."""
    match = re.fullmatch(r"\s*([0-9]+)\s*[xX*]\s*(\S+)\s*", text)
    if match is None:
        raise UsageError(f"--gpus {text}: give a number and a kind, such as 64xh100")
    count, gpu = int(match[1]), find_gpu(match[2])
    if not 1 <= count <= 1_000_000:
        raise UsageError(f"--gpus {text}: {count} GPUs; give at least 1 and at most 1000000")
    if per_node is not None and per_node < 1:
        raise UsageError(f"--per-node {per_node}: give at least 1")
    per_node = min(per_node or 8, count)
    if count % per_node:
        raise UsageError(
            f"--gpus {text}: {count} GPUs do not fill nodes of {per_node}; give --per-node, or a multiple of {per_node}"
        )
    if memory is not None:
        gpu = replace(gpu, memory=memory)
    return Cluster(gpu, count, per_node, gpu.links_of_node(per_node), link or gpu.across)
