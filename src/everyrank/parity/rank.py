"""The work of one rank for `everyrank verify`: compare each layout with one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from everyrank.data import UnevenStreams
from everyrank.launch import Launch, RankInfo
from everyrank.layout import Layout, ParallelContract, check_reference, parse_layout, register_custom_parallelize
from everyrank.loop import open_data
from everyrank.measure.provenance import provenance
from everyrank.options import VerifyOptions
from everyrank.parallel.mesh import open_mesh
from everyrank.parity import ParityCase, check_layout, gradient_case, parity_case
from everyrank.parity.kept import make_trace
from everyrank.parity.samples import check_samples
from everyrank.progress import print_lines_once, print_row, progress
from everyrank.record import Parity, Record
from everyrank.workload import Source, Workload, load
from everyrank.world import World, on_rank_0, open_world, single_process_world

__all__ = ["keep_rank", "verify_gradients_rank", "verify_rank"]


_SHARD_ORDER = (
    "with order=shard the samples of an update depend on the number of ranks; use --samples to check the reading"
)


def verify_rank(
    info: RankInfo,
    workload_or_source: Source | Workload,
    layouts: Sequence[Layout],
    launch: Launch,
    options: VerifyOptions,
) -> list[Record] | None:
    """Compare each layout with `single`. Returns one Record per layout on rank 0, None elsewhere."""
    reference = parse_layout(options.reference) if options.reference else None
    for layout in layouts if options.explicit else ():  # layouts that were not requested are skipped with a reason
        layout.mesh(info.size)
        if reference is not None:
            check_reference(layout, reference, info.size)
    with open_world(info, launch) as world:
        workload = load(workload_or_source)
        train_data, eval_data = open_data(workload, world)
        case = parity_case(
            workload,
            train_data,
            eval_data,
            options.steps,
            is_quick=options.quick,
            is_cached=not options.fresh,
            reference=reference,
        )
        records: list[Record] = []
        is_shown = options.show and world.rank == 0
        with progress(len(layouts), is_shown) as advance, print_lines_once(world.rank == 0):
            for index, layout in enumerate(layouts):
                advance(f"verify {workload.name} · {layout}")
                parity, losses = _compare_layout(case, layout, world, index, options)
                records.append(
                    Record(
                        workload=workload.name,
                        layout=str(layout),
                        launcher=info.started_by,
                        backend=world.backend,
                        device=world.device.type,
                        world_size=world.size if layout.axis else 1,
                        parity=parity,
                        loss=losses,
                        provenance=provenance(workload, train_data, world, options.command),
                    )
                )
                if is_shown and len(layouts) > 1:  # print results at once, in case the command is stopped
                    print_row(f"{layout}: {parity.outcome}")
        return records if world.rank == 0 else None


def _compare_layout(
    case: ParityCase, layout: Layout, world: World, index: int, options: VerifyOptions
) -> tuple[Parity, list[float]]:
    """Return the parity of a layout, with its sample check if requested, and its losses. A collective."""
    is_split_by_rank = case.workload.order == "shard" and not isinstance(case.train_data, UnevenStreams)
    depends_on_ranks = is_split_by_rank and layout.axis is not None and world.size > 1
    if depends_on_ranks:
        parity, losses = Parity("not_verified", reason=_SHARD_ORDER), []
    else:
        parity, losses = check_layout(case, layout, world, f"verify/{index}", options.explicit)
    if options.samples and (depends_on_ranks or parity.status in ("equal", "different")):
        parity = _with_samples(parity, case, layout, world, f"samples/{index}")
    return parity, losses


def _with_samples(parity: Parity, case: ParityCase, layout: Layout, world: World, key: str) -> Parity:
    """Add the result of the sample check to the parity."""
    data = (case.workload, case.train_data, case.eval_data)
    if layout.axis is None:
        problems_on_rank_0 = on_rank_0(
            world, key, lambda: check_samples(*data, layout, open_mesh(layout, single_process_world(world)))
        )
        problems, text = problems_on_rank_0 or ([], "")
    else:
        problems, text = check_samples(*data, layout, open_mesh(layout, world))
    if not problems:
        return dataclasses.replace(parity, checks=[*parity.checks, text])
    return dataclasses.replace(
        parity,
        status="different",
        first_divergence=parity.first_divergence or problems[0],
        cause=parity.cause or "samples are missing or repeated",
        checks=[*parity.checks, *problems],
    )


def keep_rank(
    info: RankInfo, workload_or_source: Source | Workload, launch: Launch, options: VerifyOptions
) -> dict[str, Any] | None:
    """Return the content of a trace file of `single` (`make_trace`), on rank 0."""
    with open_world(info, launch) as world:
        workload = load(workload_or_source)
        train_data, eval_data = open_data(workload, world)
        steps, is_cached = options.steps, not options.fresh
        case = parity_case(workload, train_data, eval_data, steps, is_quick=options.quick, is_cached=is_cached)
        return make_trace(case, world, options.command) if world.rank == 0 else None


def verify_gradients_rank(
    info: RankInfo,
    workload: Workload,
    layout: Layout,
    function: Callable[..., Any],
    contract: ParallelContract | None,
    launch: Launch,
) -> Parity:
    """Compare the gradients of one update under a `parallelize` function with those of one device."""
    register_custom_parallelize(layout.strategy, function, contract)
    with open_world(info, launch) as world:
        case = parity_case(workload, *open_data(workload, world), 1, is_quick=True)
        is_clipped = workload.clip_norm is not None  # then the clipped update is also compared, after the gradients
        return check_layout(case if is_clipped else gradient_case(case), layout, world, "gradients")[0]
