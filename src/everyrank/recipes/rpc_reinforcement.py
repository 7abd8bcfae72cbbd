"""Reinforcement learning over RPC (REINFORCE): observers run environments and ask one agent for actions.

Run: python rpc_reinforcement.py

Memory         the agent: the policy and its optimizer; each observer: an environment and its state
Communication  in each step, an observation to the agent and an action back; at the end of an episode, its rewards. No
               weights or gradients, because only the agent learns. Measured: 29 kB per update of about ten steps
Use when       environments are slow or need machines of their own (simulators, robots) and share one small policy

Pitfalls:
- RPC unpickles arguments and calls the function that a message names: anyone who reaches its ports can run code.
  It listens on loopback. Set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to another interface on trusted networks only.
- Observers call at the same time: the agent stores the steps of each observer separately.
- Use a random generator for each observer and episode: all runs then have the same episodes, to the last bit. One
  generator for all observers would draw numbers in the order of the calls, which differs between runs.
- Store observations and actions, not log-probabilities with their autograd graphs. Gradients of graphs from several
  threads are added in an order that differs between runs. One forward pass over the whole episode is also faster.
- Add up the losses of observers in the order of their numbers, not in the order in which they finish.
- One call for each step is slow on a slow network: send the states of many environments in one call.
- A call fails after TIMEOUT seconds. Only rpc.shutdown() waits longer, until all workers have called it.
- The parent process watches the workers. If one is killed, it ends the others, and its last line names the lost worker.
  RPC may print errors of failed calls before that line. Ctrl-C ends all workers.
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

WORKERS = ["agent", "observer0", "observer1"]  # the name of each rank
OBSERVERS = len(WORKERS) - 1
TIMEOUT = 60  # seconds until a call fails
UPDATES = 40
CELLS, STEPS = 9, 24  # length of the corridor; maximum number of steps of an episode
DISCOUNT = 0.95  # factor for the reward of the next step
SEED = 0


class Corridor:
    """A row of CELLS with the goal at the right end. An episode starts in a random other cell. Each step costs 0.05."""

    def __init__(self, observer):
        self.generator = torch.Generator().manual_seed(SEED + observer)  # draws the first cells

    def reset(self):
        self.cell = torch.randint(CELLS - 1, (), generator=self.generator).item()
        return self.cell

    def step(self, action):
        """Go left (action 0) or right (1). Return the cell, the reward and whether the episode is over."""
        self.cell = min(max(self.cell + (1 if action else -1), 0), CELLS - 1)
        is_over = self.cell == CELLS - 1
        return self.cell, 1.0 if is_over else -0.05, is_over


# --- on each observer


class Observer:
    """An environment, which takes its actions from the agent."""

    def __init__(self, observer):
        self.observer, self.environment = observer, Corridor(observer)

    def run_episode(self, agent):
        """Run an episode and return the reward of each step."""
        cell, rewards, is_over = self.environment.reset(), [], False
        while not is_over and len(rewards) < STEPS:
            action = agent.rpc_sync().choose_action(self.observer, cell)
            cell, reward, is_over = self.environment.step(action)
            rewards.append(reward)
        return rewards


# --- on the agent


class Agent:
    """The policy (logits of the two actions in each cell), and the steps of this update's episodes."""

    def __init__(self, dtype):
        self.policy = nn.Embedding(CELLS, 2, dtype=dtype)
        nn.init.zeros_(self.policy.weight)  # both actions are equally likely
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.1)

    def start_update(self, update):
        self.generators = [
            torch.Generator().manual_seed(SEED + update * OBSERVERS + index) for index in range(OBSERVERS)
        ]
        self.steps = [[] for _ in range(OBSERVERS)]  # (cell, action) of each step, for each observer

    @torch.no_grad()
    def choose_action(self, observer, cell):
        """Draw action 0 or 1 with the probabilities of the policy."""
        probabilities = self.policy(torch.tensor(cell)).softmax(0)
        action = torch.multinomial(probabilities, 1, generator=self.generators[observer]).item()
        self.steps[observer].append((cell, action))
        return action

    def learn(self, all_rewards):
        """Make an update from a list of rewards for each observer, and return the loss."""
        loss = 0
        for steps, rewards in zip(self.steps, all_rewards, strict=True):
            cells, actions = torch.tensor(steps).unbind(1)
            log_probs = self.policy(cells).log_softmax(1)[range(len(steps)), actions]
            for step in reversed(range(len(rewards) - 1)):
                rewards[step] += DISCOUNT * rewards[step + 1]  # add the discounted rewards of all later steps
            loss -= (log_probs * torch.tensor(rewards, dtype=log_probs.dtype)).sum() / OBSERVERS
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train(dtype):
    """Train the policy and print rewards and losses. Runs in the agent's main thread; others answer the observers."""
    agent = Agent(dtype)
    reference = rpc.RRef(agent)
    observers = [rpc.remote(name, Observer, (index,)) for index, name in enumerate(WORKERS[1:])]
    for update in range(UPDATES):
        agent.start_update(update)
        # All observers run their episodes at the same time. An episode makes at most STEPS calls of TIMEOUT seconds.
        episodes = [observer.rpc_async(timeout=STEPS * TIMEOUT).run_episode(reference) for observer in observers]
        all_rewards = torch.futures.wait_all(episodes)
        reward = sum(map(sum, all_rewards)) / OBSERVERS  # before learn() discounts them
        loss = agent.learn(all_rewards)
        if dtype == torch.float64:
            print(f"update {update} reward {reward}")
            print(f"update {update} loss {loss}", flush=True)
        elif update % 10 == 9:
            print(f"update {update + 1} reward {reward:.4f} loss {loss:.4f}", flush=True)


# --- the same in every script over RPC: start, watch, end


def work(rank, init_method, dtype):
    """Run one worker; torch.multiprocessing.spawn passes its rank as the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the worker at once, also while RPC waits
    warnings.filterwarnings("ignore", "You are using a Backend")  # a warning of init_rpc
    torch.set_num_threads(max(1, os.cpu_count() // len(WORKERS)))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # for calls; for init_rpc's rendezvous
        os.environ.setdefault(variable, loopback)  # the default is an address that the network can reach
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=TIMEOUT)
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=options)
    if rank == 0:
        train(dtype)
    rpc.shutdown()  # answers calls until every worker has called it


def start(*arguments):
    """Start one process per worker. If one fails, end the others; name a killed worker in one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise the other workers log every failed call
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "workers").as_uri()  # a file as rendezvous, so that no port has to be free
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
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    if not rpc.is_available():
        sys.stderr.write(f"{Path(__file__).name}: this torch is built without RPC: the builds for Linux have it\n")
        raise SystemExit(3)
    start(torch.float64 if args.float64 else torch.float32)
