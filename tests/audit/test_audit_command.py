"""`everyrank audit` on the command line: its output, its files, and scripts that cannot be audited."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from auditing import SCRIPTS, line_numbers_with
from everyrank.audit import start
from everyrank.audit.command_line import ScriptCommand, script_command
from everyrank.audit.script import starts_ranks_itself, user_source
from everyrank.errors import UsageError
from processes import Cli

MISTAKE = ("        sampler.set_epoch(epoch)\n", "")


def last_line(stderr: str) -> str:
    """Return the last line of stderr, which must have no traceback."""
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


def test_finding_is_printed_with_its_line(cli: Cli, tmp_path: Path) -> None:
    """The audit starts its own processes. It also writes JSON and an HTML page, and keeps the user's files."""
    text = (SCRIPTS / "classifier.py").read_text().replace(*MISTAKE)
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "last.pt").write_text("of an earlier run")
    result = cli(
        tmp_path, "audit", "--replay", "--json", "found.json", "--html", "found.html", "train.py", is_forked=False
    )
    assert result.status == 1, result.err
    line_number = list(line_numbers_with(text, "labels in loader:"))[-1]
    assert f"FAIL  train.py:{line_number}  data.epoch" in result.out
    assert "loader.sampler.set_epoch(epoch)" in result.out
    report = json.loads((tmp_path / "found.json").read_text())
    assert [finding["rule"] for finding in report["findings"] if finding["level"] == "FAIL"] == ["data.epoch"]
    assert report["world_size"] == 2
    [replay] = report["replay"]
    assert "updates 0 to 2 of 2 ranks" in replay
    assert replay in " ".join(result.out.split())
    page = (tmp_path / "found.html").read_text()
    assert 'class="named"' in page
    assert "for inputs, labels in loader:" in page
    assert f"<li>replay: {replay}</li>" in page
    assert "<script" not in page
    assert (tmp_path / "last.pt").read_text() == "of an earlier run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.html", "found.json", "last.pt", "train.py"]


@pytest.mark.parametrize(
    ("cpu_seconds_at", "status"),
    [
        (lambda clock: (clock, 0.0), "finished"),
        # a worker that uses 8 cores ends after 20 s; its parent waits for it, or does not, and goes on with one core
        (lambda clock: (8 * clock, 0.0) if clock < 20 else (clock - 20, 160.0), "finished"),
        (lambda clock: (8 * clock, 0.0) if clock < 20 else (clock - 20, 0.0), "finished"),
        (lambda clock: (0.0, clock), "finished"),  # a compiler for each file
        (lambda _: (2.0, 0.0), "hangs"),
        (lambda clock: (8 * clock, 0.0) if clock < 20 else (0.0, 0.0), "hangs"),
    ],
)
def test_script_that_computes_does_not_hang(
    cpu_seconds_at: Any, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without an event for 60 seconds hangs, unless it or one of its children has used the CPU."""
    clock = [0.0]

    def cpu_times() -> SimpleNamespace:
        own, of_children = cpu_seconds_at(clock[0])
        return SimpleNamespace(user=own, system=0.0, children_user=of_children, children_system=0.0)

    fake = SimpleNamespace(children=lambda recursive: [], cpu_times=cpu_times)
    monkeypatch.setattr(start, "psutil", SimpleNamespace(Process=lambda _: fake, Error=start.psutil.Error))
    fake_time = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: clock.__setitem__(0, clock[0] + 1.0))
    monkeypatch.setattr(start, "time", fake_time)
    popen: Any = SimpleNamespace(pid=1, poll=lambda: 0 if clock[0] >= 200 else None)
    processes: Any = [SimpleNamespace(process=popen)]
    assert start._wait(processes, tmp_path, 0.0, 60.0, 300.0, lambda _: None) == status


def test_output_of_an_ended_process_is_closed() -> None:
    process = start._Process(["echo", "done"], dict(os.environ))
    assert process.process.wait() == 0
    assert process.output() == "done\n"
    assert process.process.stdout is not None
    assert process.process.stdout.closed


INVALID_ARGUMENTS = [
    ((), "audit needs a script"),
    (("absent.py",), "absent.py: no such file; give a Python script"),
    (("-m",), "audit -m: give the name of a module"),
    (("--updates", "0", "good.py"), "--updates 0: give more than 0"),
    (
        ("--replay", "--watch", "good.py"),
        "--replay with --watch: --replay needs torch functions that --watch does not record",
    ),
    (("--processes", "-2", "good.py"), "--processes -2: give more than 0"),
    ((".",), ".: it is a folder"),
]


@pytest.mark.parametrize(("words", "message"), INVALID_ARGUMENTS)
def test_invalid_arguments_are_refused(cli: Cli, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "good.py").write_text("pass\n")
    result = cli(tmp_path, "audit", *words)
    assert result.status == 2
    assert message in last_line(result.err)


@pytest.mark.parametrize(
    ("command", "python_args", "processes"),
    [
        ("torchrun --no_python --nproc-per-node 2 --virtual-local-rank train.py --x 1", "train.py --x 1", 2),
        ("accelerate launch --multi-gpu --num-processes 4 -m package.train", "-m package.train", 4),
        ("accelerate-launch --tpu_cluster train.py", "train.py", None),
        ("deepspeed --enable_each_rank_log logs --bind_cores_to_rank --num_gpus 2 train.py", "train.py", 2),
        ("fabric run model --devices 2 train.py", "train.py", 2),
    ],
)
def test_script_in_the_command_of_a_launcher(command: str, python_args: str, processes: int | None) -> None:
    """Flags without a value must not take the script for their value."""
    assert script_command(command.split()) == ScriptCommand(python_args.split(), processes)


def test_command_of_mpirun_without_python_is_corrected() -> None:
    with pytest.raises(UsageError, match=r"mpirun -np 2 everyrank audit train\.py --x"):
        script_command(["mpirun", "-np", "2", "train.py", "--x"])


@pytest.mark.parametrize(
    ("text", "starts_ranks"),
    [
        ("seeds = np.random.SeedSequence(0).spawn(4)", False),
        ("generators = rng.spawn(world_size)", False),
        ("seeds = seed_sequence.spawn(4); mp.spawn(train, nprocs=2)", True),
        ("spawn(train, nprocs=2)", True),
    ],
)
def test_spawned_seeds_are_no_ranks(text: str, starts_ranks: bool) -> None:
    """A script that starts its ranks itself is started as a single process."""
    assert starts_ranks_itself(text) is starts_ranks


def test_imported_file_that_cannot_be_read_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import helper\n")
    (tmp_path / "helper.py").touch()
    read_text = Path.read_text

    def refused(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "helper.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert "import helper" in user_source(tmp_path / "train.py")


UNAUDITABLE_SCRIPTS = [
    ("pass", 2, "train.py ended without training"),
    ("for x in range(3:\n    pass\n", 2, "train.py:1: SyntaxError"),
    ("raise SystemExit(3)", 4, "ended with exit status 3"),
    ("def f():\n    return {}['lr']\nf()\n", 4, "rank 0: train.py:2 in f: KeyError: 'lr'"),
    (
        "import torch\nx = torch.ones(2, requires_grad=True)\nfor _ in range(4): (x * x).sum().backward()\n",
        2,
        "train.py: backward is called",
    ),
]


@pytest.mark.parametrize(("text", "status", "message"), UNAUDITABLE_SCRIPTS)
def test_error_of_a_script_that_cannot_be_audited(
    cli: Cli, tmp_path: Path, text: str, status: int, message: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == status, result.err
    assert message in last_line(result.err)


def test_output_of_megabytes_is_shortened(cli: Cli, tmp_path: Path) -> None:
    """The audit keeps only the end of the script's output, which shows why it failed."""
    text = "for _ in range(300_000): print('x' * 99)\nraise ValueError('no more')\n"
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 4
    assert last_line(result.err).endswith("train.py:2 in <module>: ValueError: no more")
    assert len(result.out) + len(result.err) < 1000


@pytest.mark.integration
@pytest.mark.parametrize(("imported", "message"), [("time", ""), ("time, torch", ": rank 0 was at train.py:2; rank 1")])
def test_script_that_hangs_before_training_times_out(cli: Cli, tmp_path: Path, imported: str, message: str) -> None:
    (tmp_path / "train.py").write_text(f"import {imported}\ntime.sleep(1000)\n")
    start_time = time.monotonic()
    running = cli.start(tmp_path, "audit", "--processes", 2, "--timeout", 2, "train.py", is_forked=False)
    status, _, err = running.end()
    assert status == 4
    assert "train.py: no progress for 2 s" in last_line(err)
    assert message in last_line(err)
    assert time.monotonic() < start_time + 60
    assert running.remaining_processes() == {}


@pytest.mark.integration
def test_collective_on_one_rank_is_reported(cli: Cli, tmp_path: Path) -> None:
    """The finding names the collective in the branch of one rank, although the script hangs."""
    text = (SCRIPTS / "stream.py").read_text()
    text = text.replace(
        "            optimizer.step()\n", "            optimizer.step()\n            dist.barrier() if rank else None\n"
    )
    (tmp_path / "train.py").write_text(text)
    running = cli.start(tmp_path, "audit", "--timeout", 6, "train.py")
    status, out, err = running.end()
    assert status == 1, err
    [barrier] = list(line_numbers_with(text, "dist.barrier() if rank"))
    assert "collective.order" in out
    assert f"train.py:{barrier}" in out
    assert running.remaining_processes() == {}


def test_ctrl_c_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time, torch\nprint('here')\ntime.sleep(1000)\n")
    running = cli.start(tmp_path, "audit", "--processes", 2, "train.py", is_forked=False)
    running.wait_for(lambda: len(running.processes()) >= 3)
    os.kill(running.process.pid, signal.SIGINT)
    status, _, err = running.end()
    assert status == 130
    assert last_line(err) == "everyrank: interrupted; all ranks are ended"
    assert running.remaining_processes() == {}


@pytest.mark.integration
def test_killed_audit_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time, torch\nprint('here')\ntime.sleep(1000)\n")
    running = cli.start(tmp_path, "audit", "--processes", 2, "train.py", is_forked=False)
    running.wait_for(lambda: len(running.processes()) >= 3)
    running.process.kill()
    running.end()
    assert running.remaining_processes() == {}


@pytest.mark.integration
def test_script_that_spawns_its_ranks_is_audited(cli: Cli, tmp_path: Path) -> None:
    """The audit starts the script once, and records the spawned processes."""
    text = (SCRIPTS / "classifier.py").read_text().replace(*MISTAKE)
    for before, after in (
        ('"gloo")', '"gloo", init_method=METHOD, rank=rank, world_size=2)'),
        ("def main():", f"METHOD = {(tmp_path / 'meeting').as_uri()!r}\n\n\ndef main(rank):"),
        ("\nmain()\n", '\nif __name__ == "__main__":\n    torch.multiprocessing.spawn(main, nprocs=2)\n'),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 1, result.err
    assert "data.epoch" in result.out
    assert "updates on 2 ranks" in result.out


@pytest.mark.integration
def test_audit_of_one_process_suggests_a_recipe(cli: Cli, tmp_path: Path) -> None:
    text = (
        "import torch\nimport torch.nn.functional as F\nmodel = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nx, y = torch.randn(8, 4), torch.randn(8, 2)\n"
        "for _ in range(5):\n    loss = F.mse_loss(model(x), y)\n    loss.backward()\n    optimizer.step()\n"
    )
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 1, result.err
    assert "train.py:9  gradient.carried" in result.out
    assert "`everyrank new ddp_torchrun`" in result.out


@pytest.mark.integration
def test_audit_started_by_torchrun_prints_each_finding_once(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((SCRIPTS / "classifier.py").read_text().replace(*MISTAKE))
    args = ("--standalone", "--nproc-per-node", "2", "-m", "everyrank", "audit", "train.py")
    running = cli.start(tmp_path, *args, command=("-m", "torch.distributed.run"))
    status, out, err = running.end()
    assert status == 1, err
    assert out.count("data.epoch") == 1
    assert "updates on 2 ranks" in out


@pytest.mark.integration
def test_script_under_torchrun_that_fails_with_shortened_epochs(cli: Cli, tmp_path: Path) -> None:
    """Only torchrun can restart the ranks, so the message names its option."""
    text = (SCRIPTS / "classifier.py").read_text()
    loop, counted_loop = (
        "for inputs, labels in loader:\n            loss =",
        "for (inputs, labels), _ in zip(loader, range(25), strict=True):\n            loss =",
    )
    for old, new in ((loop, counted_loop), ("DataLoader(train, 7,", "DataLoader(train, 2,")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    args = ("--standalone", "--nproc-per-node", "2", "-m", "everyrank", "audit", "train.py")
    status, _, err = cli.start(tmp_path, *args, command=("-m", "torch.distributed.run")).end()
    assert status != 0
    assert "zip() argument 2 is longer than argument 1" in err
    assert "give torchrun --max-restarts 1" in err


@pytest.mark.integration
def test_watch_audits_a_whole_run(cli: Cli, tmp_path: Path) -> None:
    """With --watch, nothing is shortened, stopped or redirected. Expensive checks are skipped and listed."""
    text = (SCRIPTS / "classifier.py").read_text().replace(*MISTAKE).replace("range(2)", "range(9)")
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "--watch", "train.py")
    assert result.status == 1, result.err
    assert "data.epoch" in result.out
    assert "1 FAIL; 25 updates on 2 ranks" in result.out  # the first 24, and the 50th of 63
    assert "not checked: collectives, losses" in result.out
    assert torch.load(tmp_path / "last.pt", weights_only=True)["epoch"] == 8
