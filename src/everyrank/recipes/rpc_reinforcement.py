"""Reinforcement learning over RPC: observers, each with an environment of its own, ask an agent what to do (REINFORCE).

Run: python rpc_reinforcement.py

Holds     the agent: the policy and its optimizer; each observer: an environment and its state
Travels   from an observer what it sees, back the action; a reward for each step at the end of an episode. Weights and
          gradients never: all of the learning is on the agent. Counted: 29 kB an update, of some ten steps
Use when  environments are slow or need machines of their own (simulators, robots) and a small policy serves them all

What goes wrong:
- RPC runs what comes over the network: it unpickles arguments, and calls the function that they name. Whoever reaches
  its ports can run anything. Here they are on loopback; open them (TP_SOCKET_IFNAME=eth0) on trusted networks only.
- Observers call at the same time: what the agent keeps of an episode is kept by observer.
- One generator of random numbers for all would be drawn from in the order in which calls come in, another one in
  every run. With one for each observer and episode the same run gives the same episodes, to the last bit.
- Not the log-probability of an action is kept, with its graph, but what was seen and done: graphs made in several
  threads give gradients that are added up in another order every time. One forward over an episode is faster, too.
- The loss adds up observers by their number, not as they finish.
- One call for each step is slow where the network is: send many environments' states in one call.
- Every call ends after TIMEOUT. What waits longer is rpc.shutdown() of a worker that serves: until all have come there.
  The process that starts the workers watches them: one that is killed ends all, and the last line names it; Ctrl-C
  ends all, too. Before that line RPC may print what calls to the lost worker came to.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import multiprocessing, nn
from torch.distributed import rpc

WORKERS = ["agent", "observer0", "observer1"]  # their names, by rank
OBSERVERS = len(WORKERS) - 1
TIMEOUT = 60  # seconds for the answer to a call
UPDATES = 40
CELLS, STEPS = 9, 24  # of the corridor; the most that an episode may take
DISCOUNT = 0.95  # of a reward that is a step later
SEED = 0


class Corridor:
    """CELLS in a row, and a goal at the right end. An episode starts somewhere to its left; each step costs 0.05."""

    def __init__(self, observer):
        self.generator = torch.Generator().manual_seed(SEED + observer)  # of starts

    def reset(self):
        self.cell = torch.randint(CELLS - 1, (), generator=self.generator).item()
        return self.cell

    def step(self, action):
        """Action 0 goes left, 1 goes right -> cell, reward, whether it is over."""
        self.cell = min(max(self.cell + (1 if action else -1), 0), CELLS - 1)
        is_over = self.cell == CELLS - 1
        return self.cell, 1.0 if is_over else -0.05, is_over


# --- on each observer


class Observer:
    """An environment, and the agent's actions carried out in it."""

    def __init__(self, observer):
        self.observer, self.environment = observer, Corridor(observer)

    def run_episode(self, agent):
        """The reward of each step."""
        cell, rewards, is_over = self.environment.reset(), [], False
        while not is_over and len(rewards) < STEPS:
            action = agent.rpc_sync().choose_action(self.observer, cell)
            cell, reward, is_over = self.environment.step(action)
            rewards.append(reward)
        return rewards


# --- on the agent


class Agent:
    """The policy: logits of the two actions in each cell; and what was seen and done in the episodes of this update."""

    def __init__(self, dtype):
        self.policy = nn.Embedding(CELLS, 2, dtype=dtype)
        nn.init.zeros_(self.policy.weight)  # both actions are equally likely
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.1)

    def begin(self, update):
        self.generators = [
            torch.Generator().manual_seed(SEED + update * OBSERVERS + index) for index in range(OBSERVERS)
        ]
        self.steps = [[] for _ in range(OBSERVERS)]  # of each observer: (cell, action)

    @torch.no_grad()
    def choose_action(self, observer, cell):
        """Draws 0 or 1, as likely as the policy says."""
        probabilities = self.policy(torch.tensor(cell)).softmax(0)
        action = torch.multinomial(probabilities, 1, generator=self.generators[observer]).item()
        self.steps[observer].append((cell, action))
        return action

    def learn(self, all_rewards):
        """One update from the rewards of all observers, a list for each; the loss."""
        loss = 0
        for steps, rewards in zip(self.steps, all_rewards, strict=True):
            cells, actions = torch.tensor(steps).unbind(1)
            log_probs = self.policy(cells).log_softmax(1)[range(len(steps)), actions]
            for step in reversed(range(len(rewards) - 1)):
                rewards[step] += DISCOUNT * rewards[step + 1]  # each with what came after it
            loss -= (log_probs * torch.tensor(rewards, dtype=log_probs.dtype)).sum() / OBSERVERS
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train(dtype):
    """On the agent, in the main thread; the observers' questions are answered in others."""
    agent = Agent(dtype)
    reference = rpc.RRef(agent)
    observers = [rpc.remote(name, Observer, (index,)) for index, name in enumerate(WORKERS[1:])]
    for update in range(UPDATES):
        agent.begin(update)
        # All observers run their episode at the same time. Each call of theirs has TIMEOUT, an episode STEPS of these.
        episodes = [observer.rpc_async(timeout=STEPS * TIMEOUT).run_episode(reference) for observer in observers]
        all_rewards = torch.futures.wait_all(episodes)
        print(f"update {update} reward {sum(map(sum, all_rewards)) / OBSERVERS}")
        print(f"update {update} loss {agent.learn(all_rewards)}", flush=True)


# --- the same in every script over RPC: start, watch, end


def work(rank, init_method, dtype):
    """What each process runs; spawn passes its rank first."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, wherever RPC waits
    warnings.filterwarnings("ignore", "You are using a Backend")  # what init_rpc says of itself
    torch.set_num_threads(max(1, os.cpu_count() // len(WORKERS)))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # of the calls; of what init_rpc exchanges
        os.environ.setdefault(variable, loopback)  # else the address of the host's name, open to its network
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=TIMEOUT)
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=options)
    if rank == 0:
        train(dtype)
    rpc.shutdown()  # answers calls until every worker has come here


def start(*arguments):
    """One process for each worker. The first that fails ends all of them; one that is killed is named in one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else those that are left list the calls that they miss
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "workers").as_uri()  # where they find each other: no port has to be free
        spawned = multiprocessing.spawn(work, (init_method, *arguments), len(WORKERS), join=False)
        try:
            while not spawned.join():
                pass
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
            killed = [rank for rank, worker in enumerate(spawned.processes) if worker.exitcode == -signal.SIGKILL]
            if not killed and isinstance(error, multiprocessing.ProcessRaisedException):
                raise  # with its traceback
            name = WORKERS[killed[0] if killed else error.error_index]
            raise SystemExit(f"{Path(__file__).name}: worker {name} was lost: the others were ended") from None
        finally:
            for worker in spawned.processes:
                worker.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    if not rpc.is_available():
        sys.stderr.write(f"{Path(__file__).name}: this torch is built without RPC: the builds for Linux have it\n")
        raise SystemExit(3)
    start(torch.float64 if args.float64 else torch.float32)
