"""Audits a script: decides how to start it, runs it, reads its events, and runs the rules."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from everyrank.audit.events import (
    Altered,
    Backward,
    CollectiveCall,
    GroupOpened,
    LoaderBatch,
    OptimizerStep,
    SourceFiles,
    Stopped,
    Unchecked,
    Wrap,
)
from everyrank.audit.evidence import Evidence, read_evidence
from everyrank.audit.external_launch import external_rank, gather_runs, remove_shared_folder, shared_folder
from everyrank.audit.finding import Finding, Findings, short_location
from everyrank.audit.rules import RULES
from everyrank.audit.script import (
    are_distributed,
    check_arguments,
    enough_gpus,
    find_script,
    is_distributed,
    mentions_cuda,
    starts_ranks_itself,
    user_source,
    without_gpus,
)
from everyrank.audit.start import ScriptRun, rank_environments, run_script
from everyrank.audit.watch.recorder import Settings
from everyrank.audit.watch.source_location import is_user_file
from everyrank.errors import CannotRunError, EveryrankError, RankFailedError, UsageError, shortened, signal_text
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.stalled_ranks import lost_another
from everyrank.workload.scan import workload_names

__all__ = ["Audit", "AuditOptions", "ScriptFailedError", "audit_script", "judge_run"]

_SEPARATE_MODELS_HINT = (
    "ignore this if each rank is to train a model of its own, as in an ensemble or a cross-validation"
)
_RULES_FOR_ONE_MODEL = (
    *("gradient.local", "clip.local", "replicas.", "eval.shard"),
    *("data.rows", "data.overlap", "data.same", "data.split"),
)
"""Rules whose findings are no mistakes if each rank trains a model of its own."""
_FIRST_BATCHES = 4  # batches of a shortened epoch before its last one
_REPLAYED_UPDATES = 3
_NEEDS_RANK_VARIABLES = re.compile(
    r"KeyError: '((LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR)'|environment variable \w+ expected"
)
_NEEDS_CUDA = re.compile(
    r"not compiled with CUDA|no NVIDIA driver|CUDA is not available|CUDA-capable|_cuda_\w+|ATen_cuda", re.IGNORECASE
)
_TAIL_LINES = 14  # of a traceback
# the backend cannot connect to a rank that has ended; the user's code may lose other connections
_REFUSED_BY_PEER = re.compile(r"(gloo|nccl|c10d|\bDist\w*Error|SocketImpl).*connection refused", re.IGNORECASE)
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Warning)\b")
_TRACEBACK_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')


class ScriptFailedError(RankFailedError):
    """The script failed with an error of its own.

    tail   the last lines of its traceback
    audit  the findings until then; None if the script had not trained yet
    """

    def __init__(self, message: str, log: Path | None, tail: list[str]) -> None:
        super().__init__(message, log)
        self.tail = tail
        self.audit: Audit | None = None

    def with_advice(self, advice: str) -> ScriptFailedError:
        """The same error with advice at the end of its message."""
        error = ScriptFailedError(f"{self}; {advice}", self.log, self.tail)
        error.audit = self.audit
        return error


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """How a script is audited.

    processes        number of ranks to start, as torchrun does; None: 2, or as many as the script starts itself
    updates          number of updates whose gradients are recorded
    watch            run the whole script at low cost: record no collectives, losses or waits, and shorten no epochs
    timeout_seconds  time without progress after which a script counts as hanging
    limit_seconds    time limit of the whole run
    replay           run the first updates again, in one process and float64
    pretend_cuda     run CUDA calls on the CPU, even if the script does not seem to use CUDA
    shim             a folder of modules to import first, to replace names that today's packages lack
    """

    processes: int | None = None
    updates: int = 12
    watch: bool = False
    timeout_seconds: float = 60.0
    limit_seconds: float = 900.0
    replay: bool = False
    pretend_cuda: bool = False
    shim: Path | None = None

    def __post_init__(self) -> None:
        for name in ("processes", "updates", "timeout_seconds", "limit_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name.removesuffix('_seconds')} {value}: give more than 0")
        if self.replay and self.watch:
            raise UsageError(
                "--replay with --watch: --replay needs torch functions that --watch does not record; give one of them"
            )
        if self.shim is not None and not self.shim.is_dir():
            raise UsageError(f"--shim {self.shim}: not a folder; give a folder of modules to import first")


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of an audit.

    python_args  the script and its arguments
    altered      how the run differed from the script as it is written
    unchecked    what could not be checked, or did not occur
    replayed     results of --replay
    doubt        why an audit without findings does not mean that the script is correct; "" if it does
    """

    python_args: tuple[str, ...]
    world_size: int
    updates: int
    seconds: float
    findings: tuple[Finding, ...]
    altered: tuple[str, ...]
    unchecked: tuple[str, ...]
    replayed: tuple[str, ...] = ()
    doubt: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether there is a finding of level FAIL."""
        return any(finding.level == "FAIL" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The audit as --json writes it."""
        return {
            "schema": 1,
            "words": list(self.python_args),
            "world_size": self.world_size,
            "updates": self.updates,
            "seconds": round(self.seconds, 1),
            "findings": [finding.as_json() for finding in self.findings],
            "replay": list(self.replayed),
            "doubt": self.doubt,
            "altered": list(self.altered),
            "not_checked": list(self.unchecked),
        }


def audit_script(
    python_args: Sequence[str],
    options: AuditOptions = AuditOptions(),
    on_update: Callable[[int], None] = lambda _: None,
    may_change_ranks: bool | None = None,
) -> Audit | None:
    """Run `python *python_args` with hooks, and judge the events that they record. Does not change the user's files.

    python_args       a script and its arguments, or -m, a module, and its arguments
    on_update         called with the number of updates so far when it grows
    may_change_ranks  whether to try a different number of ranks if the script needs it; None: if `options` has none

    In a rank that torchrun has started, this runs only that rank's script, and returns None on all ranks except 0.

    Raises `UsageError` if there is no such script or it never trains, and `RankFailedError` if the script fails.
    """
    script = find_script(python_args)
    source = user_source(script) if script else ""
    num_ranks = options.processes or (2 if script is None or is_distributed(source) else 1)
    uses_gpu = options.pretend_cuda or mentions_cuda(f"{source} {' '.join(python_args)}")
    info = external_rank(os.environ)
    ranks_on_host = num_ranks if info is None else info.local_size
    devices = 0 if enough_gpus(ranks_on_host) or not uses_gpu else num_ranks
    if info is not None:
        return _audit_external_rank(python_args, script, options, info, info.size if devices else 0, on_update)
    starts_ranks = options.processes is None and starts_ranks_itself(source)
    if num_ranks > 1 and not starts_ranks:
        check_arguments(python_args)
    ranks = [without_gpus(num_ranks)] if starts_ranks else rank_environments(num_ranks)
    first_error: RankFailedError | None = None
    attempts = list(_attempts(options, devices))
    while attempts:
        folder = _new_folder()
        settings = _settings(folder, script, options, *attempts.pop(0))
        try:
            run = run_script(
                python_args, settings, ranks, options.timeout_seconds, options.limit_seconds, num_ranks, on_update
            )
            evidence = read_evidence(run)
            may_restart = options.processes is None if may_change_ranks is None else may_change_ranks
            better_num_ranks = None
            if may_restart and not starts_ranks:
                better_num_ranks = _better_num_ranks(run, evidence, script, num_ranks)
            if better_num_ranks is not None:
                options = dataclasses.replace(options, processes=better_num_ranks)
                return audit_script(python_args, options, on_update, may_change_ranks=better_num_ranks > 1)
            audit = _judge(python_args, run, evidence, options, settings)
            if may_change_ranks is False and audit.doubt == _SINGLE_RANK_DOUBT:
                audit = dataclasses.replace(audit, doubt="")  # two ranks were tried, and did not communicate
            return audit
        except RankFailedError as error:
            first_error = first_error or error
            needs_ranks = _NEEDS_RANK_VARIABLES.search(str(error)) is not None
            if needs_ranks and (starts_ranks or num_ranks == 1) and options.processes is None:
                # the script can spawn ranks but did not, or it was started as a single process
                return audit_script(python_args, dataclasses.replace(options, processes=max(2, num_ranks)), on_update)
            if not devices and not enough_gpus(num_ranks) and _NEEDS_CUDA.search(str(error)):
                devices = num_ranks
                attempts = list(_attempts(options, devices))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    assert first_error is not None
    raise first_error


def _better_num_ranks(run: ScriptRun, evidence: Evidence, script: Path | None, num_ranks: int) -> int | None:
    """A better number of ranks for this script, based on the files that it has imported; None if there is none.

    It is 2 if the script has imported user files that use torch.distributed, and 1 if only files other than the script
    use it and the ranks did not communicate.
    """
    if num_ranks == 1:
        return 2 if _imports_distributed(evidence) else None
    communicates = (
        any(evidence.all_of(GroupOpened)) or any(evidence.all_of(CollectiveCall)) or any(evidence.all_of(Wrap))
    )
    is_distributed_run = script is None or are_distributed([str(script)]) or communicates or run.status != "finished"
    return None if is_distributed_run else 1


def _imports_distributed(evidence: Evidence) -> bool:
    """Whether the script has imported user files that use torch.distributed."""
    return any(are_distributed(event.files) for event in evidence.all_of(SourceFiles))


def _audit_external_rank(
    python_args: Sequence[str],
    script: Path | None,
    options: AuditOptions,
    info: RankInfo,
    devices: int,
    on_update: Callable[[int], None],
) -> Audit | None:
    """Run the script of a rank that an external launcher has started. Rank 0 also judges all ranks.

    If torchrun has restarted the ranks after a failure, epochs are not shortened.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    is_restart, is_last_restart = restarts > 0, restarts >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    folder = shared_folder(info, os.environ, python_args)
    settings = _settings(folder, script, options, devices, 0 if options.watch or is_restart else _FIRST_BATCHES)
    try:
        run = run_script(
            python_args,
            settings,
            [without_gpus(info.local_size)],
            options.timeout_seconds,
            options.limit_seconds,
            info.size,
            on_update,
            ends_all_processes=False,
        )
        all_ranks_run = gather_runs(run, info)
        return None if all_ranks_run is None else judge_run(python_args, all_ranks_run, options, settings)
    except ScriptFailedError as error:
        if settings.batches and not is_last_restart:
            error.audit = None  # shortened epochs may be the cause, so the next start is judged
        if settings.batches and is_last_restart:
            by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
            advice = "give torchrun --max-restarts 1" if by_torchrun else "let everyrank audit start the ranks"
            raise error.with_advice(f"the audit shortens epochs: if that is the cause, {advice}") from None
        raise
    finally:
        if info.rank == 0:
            remove_shared_folder(folder)


def _new_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="everyrank-audit-"))
    except OSError as error:
        raise CannotRunError(f"cannot create a temporary folder: {error}; set TMPDIR to a writable folder") from error


def _attempts(options: AuditOptions, devices: int) -> Iterable[tuple[int, int]]:
    """(pretended devices, batches of an epoch; 0: all) to try in turn, because either may make a script fail."""
    batches = 0 if options.watch else _FIRST_BATCHES
    return dict.fromkeys(((devices, batches), (devices, 0), (0, 0)))


def _settings(folder: Path, script: Path | None, options: AuditOptions, devices: int, batches: int) -> Settings:
    return Settings(
        str(folder),
        updates=options.updates,
        batches=batches,
        epochs=0 if options.watch else 2,
        devices=devices,
        records_functions=not options.watch,
        replay=min(_REPLAYED_UPDATES, options.updates) if options.replay else 0,
        keep_files=options.watch,
        shim=str(options.shim.absolute()) if options.shim is not None else "",
        main=str(script.absolute()) if script else "",
    )


def judge_run(python_args: Sequence[str], run: ScriptRun, options: AuditOptions, settings: Settings) -> Audit:
    """Judge a recorded run. Raises as `audit_script` does."""
    return _judge(python_args, run, read_evidence(run), options, settings)


def _judge(
    python_args: Sequence[str], run: ScriptRun, evidence: Evidence, options: AuditOptions, settings: Settings
) -> Audit:
    if run.status == "failed" and not _has_seen_enough(run, evidence) and not _is_explained(evidence):
        error = _script_error(run)
        if evidence.steps:
            with contextlib.suppress(Exception):  # rules may fail, because they expect complete events
                error.audit = _make_audit(python_args, run, evidence, options, settings)
        raise error
    if not evidence.ranks or not evidence.all_of(OptimizerStep):
        _raise_never_trained(python_args, run, evidence, options)
    return _make_audit(python_args, run, evidence, options, settings)


def _apply_rules(evidence: Evidence) -> Findings:
    findings = Findings()
    for rule in RULES:
        rule.check(evidence, findings)
    if evidence.has_separate_models:
        findings.downgrade_failures(_RULES_FOR_ONE_MODEL, _SEPARATE_MODELS_HINT)
    return findings


def _make_audit(
    python_args: Sequence[str], run: ScriptRun, evidence: Evidence, options: AuditOptions, settings: Settings
) -> Audit:
    findings = _apply_rules(evidence)
    if run.world_size > evidence.world_size == 1 and not evidence.calls_by_rpc:
        findings.add_unchecked("communication between ranks: it was not recorded, and the processes look like one rank")
    elif evidence.world_size == 1 and not evidence.calls_by_rpc:
        findings.add_unchecked(
            "communication between ranks: this is a single process; see `everyrank new ddp_torchrun`"
        )
    if evidence.calls_by_rpc:
        findings.add_unchecked("RPC: calls between workers, and gradients of distributed autograd")
    for event in evidence.all_of(Unchecked):
        findings.add_unchecked(event.message)
    if run.status == "timed_out":
        findings.add_unchecked(f"later updates: the script was ended after --limit {options.limit_seconds:g} s")
    if options.watch:
        findings.add_unchecked("collectives, losses, dropout, sharded evaluations, waits: --watch does not record them")
    if any(event.is_after_skip for event in evidence.all_of(LoaderBatch)):
        findings.add_unchecked(
            f"batches in the middle of an epoch: only the first {_FIRST_BATCHES} to {_FIRST_BATCHES + 3} and the last "
            "one were run"
        )
    altered = [event.message for event in evidence.all_of(Altered)]
    if not settings.batches and not options.watch:
        altered.append("epochs were not shortened, because the script failed with shortened epochs")
    elif len(evidence.steps) < options.updates and run.status == "finished" and evidence.updates_after_skip:
        findings.add_unchecked(
            f"updates after the first {len(evidence.steps)}: only two epochs were run, and they were shortened"
        )
    if settings.devices:
        reason = "fewer GPUs than ranks" if enough_gpus(1) else "no GPU found"
        altered.insert(0, f"{reason}; CUDA calls ran on the CPU and NCCL was replaced by gloo")
    return Audit(
        tuple(python_args),
        evidence.world_size,
        len(evidence.steps),
        run.seconds,
        tuple(findings.worst_first()),
        tuple(dict.fromkeys(altered)),
        tuple(findings.unchecked),
        tuple(findings.replayed),
        _doubt(run, evidence),
    )


_SINGLE_RANK_DOUBT = "only one rank of a distributed script was checked (use --processes 2)"


def _doubt(run: ScriptRun, evidence: Evidence) -> str:
    """Why an audit without findings does not mean that the script is correct; "" if it does."""
    if run.status == "timed_out":
        return "ended by --limit before all checks were possible"
    if run.world_size == 1 and _imports_distributed(evidence):
        return _SINGLE_RANK_DOUBT
    if not evidence.all_of(Backward):
        return "no backward was recorded, so gradients were not checked"
    return ""


def _has_seen_enough(run: ScriptRun, evidence: Evidence) -> bool:
    """Whether the audit has ended all ranks, or some ranks, so that the others failed while they waited for them."""
    ended_ranks = [rank for rank in evidence.ranks if evidence.of(rank, Stopped)]
    if len(ended_ranks) == len(evidence.ranks) or evidence.calls_by_rpc:  # with RPC the first rank ends all
        return bool(ended_ranks)
    failed_ranks = _failed_by_themselves(run)
    return bool(ended_ranks and failed_ranks) and all(
        any(map(_has_lost_peer, run.outputs[rank].splitlines())) for rank in failed_ranks
    )


def _has_lost_peer(line: str) -> bool:
    """Whether a line of output is the error of a rank that has lost its connection to another rank."""
    return lost_another(line) or _REFUSED_BY_PEER.search(line) is not None


def _failed_by_themselves(run: ScriptRun) -> list[int]:
    """The ranks that exited with an error. Ranks that a signal ended may have been ended by the audit."""
    return [rank for rank, code in enumerate(run.codes) if code not in (0, None, -9, -15)]


def _is_explained(evidence: Evidence) -> bool:
    """Whether a rule explains why the script has failed."""
    for rule in RULES:
        findings = Findings()
        if rule.explains_failure:
            rule.check(evidence, findings)
            if findings.has(*rule.explains_failure):
                return True
    return False


def _script_error(run: ScriptRun) -> ScriptFailedError:
    """The error of the script with its line and message. Writes the output of each rank to a folder."""
    failed_ranks = _failed_by_themselves(run)
    # a rank that failed because it lost its connection to another rank is not the cause
    causing_ranks = [rank for rank in failed_ranks if not _has_lost_peer(_last_error(run.outputs[rank].splitlines()))]
    killed_ranks = [rank for rank, code in enumerate(run.codes) if code is not None and code < 0]
    rank = next(iter([*causing_ranks, *killed_ranks, *failed_ranks]), 0)
    lines = [line for line in run.outputs[rank].splitlines() if line.strip()]
    frames = [frame for frame in _TRACEBACK_FRAME.findall(run.outputs[rank]) if is_user_file(frame[0])]
    code, last_line = run.codes[rank], (lines or [""])[-1].strip()
    prefix, message = "", _last_error(lines)
    if code is not None and code < 0:
        message = f"the script was ended by {signal_text(-code)}" + (f"; its last line: {last_line}" if lines else "")
    elif not message:
        ending = f"; its last line: {last_line}" if lines else " and printed nothing"
        message = f"the script ended with exit status {code}{ending}"
    elif frames:
        file, line, function = frames[-1]
        prefix = f"{short_location(file)}:{line}{f' in {function}' if function else ''}: "
    return ScriptFailedError(f"rank {rank}: {prefix}{shortened(message)}", _saved_outputs(run, rank), _tail(lines))


def _tail(lines: Sequence[str]) -> list[str]:
    """The last lines of a rank's output, starting at its last traceback."""
    start = max((index for index, line in enumerate(lines) if "Traceback (most" in line), default=-1)
    return list(lines[start + 1 :][-_TAIL_LINES:])


def _saved_outputs(run: ScriptRun, failed_rank: int) -> Path | None:
    """Write the output of each rank to a file. Returns the file of the failed rank; None if it cannot be written."""
    with contextlib.suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix="everyrank-logs-"))
        for rank, output in enumerate(run.outputs):
            (folder / f"rank{rank}.log").write_text(output, encoding="utf-8", errors="replace")
        return folder / f"rank{failed_rank}.log"
    return None


def _last_error(lines: Sequence[str]) -> str:
    """The exception of the last traceback, without a prefix such as "[rank0]: ". "" if there is no exception.

    Without a traceback it is the last line that looks like an exception.
    """
    texts = [re.sub(r"^\[rank\d+\]: ?", "", line).rstrip() for line in lines]
    start = max((index for index, text in enumerate(texts) if "Traceback (most recent call last)" in text), default=-1)
    after_traceback = (text for text in texts[start + 1 :] if text and not text[0].isspace())
    error_lines = [text for text in texts if _ERROR_LINE.match(text)]
    return next(after_traceback, "") if start >= 0 else (error_lines or [""])[-1]


def _raise_never_trained(python_args: Sequence[str], run: ScriptRun, evidence: Evidence, options: AuditOptions) -> None:
    name = " ".join(python_args[:2]) if python_args[0] == "-m" else python_args[0]
    if run.status == "hangs":
        lines = {rank: evidence.stopped_at(rank) for rank in evidence.ranks}
        stopped_at = "; ".join(f"rank {rank} was at {short_location(line)}" for rank, line in lines.items() if line)
        message = f"{name}: no progress for {options.timeout_seconds:g} s before its first update"
        raise EveryrankError(message + (f": {stopped_at}" if stopped_at else ""))
    if run.status == "timed_out":
        raise EveryrankError(f"{name}: no update within {options.limit_seconds:g} s; give a longer --limit")
    if evidence.ranks and evidence.all_of(Backward):
        raise UsageError(
            f"{name}: backward is called, but no optimizer of torch.optim steps, so there is nothing to audit"
        )
    if python_args[0] != "-m" and workload_names(Path(python_args[0])):
        raise UsageError(f"{name} defines a workload and does not train it. Run: everyrank verify {shlex.quote(name)}")
    raise UsageError(f"{name} ended without training: no backward and no optimizer step was recorded")
