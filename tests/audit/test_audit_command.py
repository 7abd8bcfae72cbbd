"""`everyrank audit` as a person types it: what it prints and leaves, and scripts that cannot be audited."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from auditing import SCRIPTS, lines_with
from processes import Cli

MISTAKE = ("        sampler.set_epoch(epoch)\n", "")


def last_line(stderr: str) -> str:
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


def test_a_mistake_is_printed_with_its_line(cli: Cli, tmp_path: Path) -> None:
    """Started for real, in processes of its own; also written as JSON and as a page."""
    text = (SCRIPTS / "classifier.py").read_text().replace(*MISTAKE)
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "last.pt").write_text("of an earlier run")
    done = cli(
        tmp_path, "audit", "--replay", "--json", "found.json", "--html", "found.html", "train.py", is_forked=False
    )
    assert done.status == 1, done.err
    number = list(lines_with(text, "labels in loader:"))[-1]
    assert f"FAIL  train.py:{number}  data.epoch" in done.out
    assert "loader.sampler.set_epoch(epoch)" in done.out
    found = json.loads((tmp_path / "found.json").read_text())
    assert [finding["rule"] for finding in found["findings"] if finding["level"] == "FAIL"] == ["data.epoch"]
    assert found["world_size"] == 2
    [replay] = found["replay"]
    assert "updates 0 to 2 of 2 ranks" in replay
    assert replay in " ".join(done.out.split())
    page = (tmp_path / "found.html").read_text()
    assert 'class="named"' in page
    assert "for inputs, labels in loader:" in page
    assert f"<li>replay: {replay}</li>" in page
    assert "<script" not in page
    assert (tmp_path / "last.pt").read_text() == "of an earlier run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.html", "found.json", "last.pt", "train.py"]


NO_SCRIPT = [
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


@pytest.mark.parametrize(("words", "said"), NO_SCRIPT)
def test_a_call_that_is_wrong_is_refused(cli: Cli, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "good.py").write_text("pass\n")
    done = cli(tmp_path, "audit", *words)
    assert done.status == 2
    assert said in last_line(done.err)


ENDS = [
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


@pytest.mark.parametrize(("text", "status", "said"), ENDS)
def test_a_script_that_cannot_be_audited(cli: Cli, tmp_path: Path, text: str, status: int, said: str) -> None:
    (tmp_path / "train.py").write_text(text)
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == status, done.err
    assert said in last_line(done.err)


def test_megabytes_are_no_burden(cli: Cli, tmp_path: Path) -> None:
    """What a script prints is kept in part: its last lines say why it failed."""
    text = "for _ in range(300_000): print('x' * 99)\nraise ValueError('no more')\n"
    (tmp_path / "train.py").write_text(text)
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 4
    assert last_line(done.err).endswith("train.py:2 in <module>: ValueError: no more")
    assert len(done.out) + len(done.err) < 1000


@pytest.mark.integration
@pytest.mark.parametrize(("imported", "said"), [("time", ""), ("time, torch", ": rank 0 was at train.py:2; rank 1")])
def test_a_script_that_hangs_before_it_trains(cli: Cli, tmp_path: Path, imported: str, said: str) -> None:
    (tmp_path / "train.py").write_text(f"import {imported}\ntime.sleep(1000)\n")
    begin = time.monotonic()
    running = cli.start(tmp_path, "audit", "--processes", 2, "--timeout", 2, "train.py", is_forked=False)
    status, _, err = running.end()
    assert status == 4
    assert "train.py: no progress for 2 s" in last_line(err)
    assert said in last_line(err)
    assert time.monotonic() < begin + 60
    assert running.left() == {}


@pytest.mark.integration
def test_a_rank_that_never_comes_is_explained(cli: Cli, tmp_path: Path) -> None:
    """A collective in one branch: which line waits, and where the other rank stands."""
    text = (SCRIPTS / "stream.py").read_text()
    text = text.replace(
        "            optimizer.step()\n", "            optimizer.step()\n            dist.barrier() if rank else None\n"
    )
    (tmp_path / "train.py").write_text(text)
    running = cli.start(tmp_path, "audit", "--timeout", 6, "train.py")
    status, out, err = running.end()
    assert status == 1, err
    [barrier] = list(lines_with(text, "dist.barrier() if rank"))
    assert "collective.order" in out
    assert f"train.py:{barrier}" in out
    assert running.left() == {}


def test_ctrl_c_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time, torch\nprint('here')\ntime.sleep(1000)\n")
    running = cli.start(tmp_path, "audit", "--processes", 2, "train.py", is_forked=False)
    running.wait_for(lambda: len(running.processes()) >= 3)
    os.kill(running.process.pid, signal.SIGINT)
    status, _, err = running.end()
    assert status == 130
    assert last_line(err) == "everyrank: interrupted; all ranks are ended"
    assert running.left() == {}


@pytest.mark.integration
def test_nothing_stays_when_the_audit_is_killed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time, torch\nprint('here')\ntime.sleep(1000)\n")
    running = cli.start(tmp_path, "audit", "--processes", 2, "train.py", is_forked=False)
    running.wait_for(lambda: len(running.processes()) >= 3)
    running.process.kill()
    running.end()
    assert running.left() == {}


@pytest.mark.integration
def test_a_script_that_starts_its_own_ranks(cli: Cli, tmp_path: Path) -> None:
    """Started once: what it spawns is watched."""
    text = (SCRIPTS / "classifier.py").read_text().replace(*MISTAKE)
    for before, after in (
        ('"gloo")', '"gloo", init_method=METHOD, rank=rank, world_size=2)'),
        ("def main():", f"METHOD = {(tmp_path / 'meeting').as_uri()!r}\n\n\ndef main(rank):"),
        ("\nmain()\n", '\nif __name__ == "__main__":\n    torch.multiprocessing.spawn(main, nprocs=2)\n'),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "train.py").write_text(text)
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 1, done.err
    assert "data.epoch" in done.out
    assert "updates on 2 ranks" in done.out


@pytest.mark.integration
def test_one_process_is_told_how_it_becomes_more(cli: Cli, tmp_path: Path) -> None:
    text = (
        "import torch\nimport torch.nn.functional as F\nmodel = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nx, y = torch.randn(8, 4), torch.randn(8, 2)\n"
        "for _ in range(5):\n    loss = F.mse_loss(model(x), y)\n    loss.backward()\n    optimizer.step()\n"
    )
    (tmp_path / "train.py").write_text(text)
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 1, done.err
    assert "train.py:9  gradient.carried" in done.out
    assert "`everyrank new ddp_torchrun`" in done.out


@pytest.mark.integration
def test_started_by_torchrun_from_outside(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((SCRIPTS / "classifier.py").read_text().replace(*MISTAKE))
    words = ("--standalone", "--nproc-per-node", "2", "-m", "everyrank", "audit", "train.py")
    running = cli.start(tmp_path, *words, command=("-m", "torch.distributed.run"))
    status, out, err = running.end()
    assert status == 1, err
    assert out.count("data.epoch") == 1
    assert "updates on 2 ranks" in out


@pytest.mark.integration
def test_ranks_from_outside_that_fail_with_shortened_epochs(cli: Cli, tmp_path: Path) -> None:
    """Only the launcher can start them again, so the message names its option."""
    text = (SCRIPTS / "classifier.py").read_text()
    loop, counted = (
        "for inputs, labels in loader:\n            loss =",
        "for (inputs, labels), _ in zip(loader, range(25), strict=True):\n            loss =",
    )
    for old, new in ((loop, counted), ("DataLoader(train, 7,", "DataLoader(train, 2,")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    words = ("--standalone", "--nproc-per-node", "2", "-m", "everyrank", "audit", "train.py")
    status, _, err = cli.start(tmp_path, *words, command=("-m", "torch.distributed.run")).end()
    assert status != 0
    assert "zip() argument 2 is longer than argument 1" in err
    assert "give torchrun --max-restarts 1" in err


@pytest.mark.integration
def test_a_whole_run_is_watched(cli: Cli, tmp_path: Path) -> None:
    """--watch: nothing is shortened, stopped or redirected; what costs much is left out, and said."""
    text = (SCRIPTS / "classifier.py").read_text().replace(*MISTAKE).replace("range(2)", "range(9)")
    (tmp_path / "train.py").write_text(text)
    done = cli(tmp_path, "audit", "--watch", "train.py")
    assert done.status == 1, done.err
    assert "data.epoch" in done.out
    assert "1 FAIL; 25 updates on 2 ranks" in done.out  # the first 24, and the 50th of 63
    assert "not checked: collectives, losses" in done.out
    assert torch.load(tmp_path / "last.pt", weights_only=True)["epoch"] == 8
