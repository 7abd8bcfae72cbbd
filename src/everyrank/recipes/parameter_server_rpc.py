"""Synchronous parameter server over RPC (torch.distributed.rpc): trainers call functions of the server.

Run: torchrun --standalone --nproc-per-node 3 parameter_server_rpc.py

    trainer                                    server
    rpc_sync(pull)         ── call ──►         returns the parameters
                           ◄─ result ─
    rpc_sync(push, ..)     ── call ──►         waits for all trainers, makes one update
                           ◄─ result ─

Memory         the server: parameters, gradients, optimizer state; a trainer: parameters and gradients
Communication  per update, each trainer gets the parameters as the result of a call, and sends its gradients as an
               argument, with the sum of the loss and the number of samples as two more elements
Use when       you want to see how RPC works. DDP is better for training, and torch adds no features to RPC.
               parameter_server.py does the same without RPC

Trusted networks only: RPC unpickles what it receives, so anyone who reaches its port can run code. It listens on the
loopback interface. For several hosts set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface of a private network.

Pitfalls:
- A waiting call occupies a server thread. With fewer threads than trainers, the server never reads the last push.
- rpc.shutdown() waits until all workers have called it. Do not use it if the training has to survive the death of a
  trainer.
- This script sends CPU tensors. To send CUDA tensors, set device_map in the options of every caller.
"""

import argparse
import os
import socket
import sys
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed import rpc
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all trainers: more trainers do not change it


class Server:
    """The model and its optimizer. RPC calls its methods in threads, one for each trainer that waits."""

    def __init__(self, model, num_trainers):
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
        self.num_trainers, self.num_updates = num_trainers, 0
        self.pushed, self.losses = {}, []
        self.changed = threading.Condition()

    def push(self, trainer, message):
        """Add a gradient, and return when its update is done."""
        with self.changed:
            update = self.num_updates
            self.pushed[trainer] = message
            if len(self.pushed) == self.num_trainers:
                self.make_update()
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.num_updates > update)

    def make_update(self):
        pushed = [self.pushed[trainer] for trainer in sorted(self.pushed)]  # a fixed order, for the same rounding
        *gradient, loss, count = sum(pushed).split([*(p.numel() for p in self.parameters), 1, 1])
        for parameter, values in zip(self.parameters, gradient, strict=True):
            parameter.grad = values.view_as(parameter) / count  # a sum over samples of all trainers, now their mean
        self.optimizer.step()
        self.losses.append(loss / count)
        self.pushed.clear()
        self.num_updates += 1


server = None  # set in the server's process. Trainers call the functions below, which RPC looks up by name


def pull():
    return parameters_to_vector(server.parameters).detach()


def push(trainer, message):
    server.push(trainer, message)


def train(model, data, index, num_trainers, device):
    """Run a trainer: pull parameters, compute gradients of its part of each batch, push them."""
    parameters = list(model.parameters())
    sampler = DistributedBatchSampler(len(data), BATCH, index, num_trainers)
    loader = DataLoader(data, batch_sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        for images, labels in loader:
            vector_to_parameters(rpc.rpc_sync("server", pull).to(device), parameters)
            loss = F.cross_entropy(model(images.to(device)), labels.to(device), reduction="sum")
            gradients = torch.autograd.grad(loss, parameters)
            tail = gradients[0].new_tensor([loss.item(), len(labels)])
            message = torch.cat([*(gradient.reshape(-1) for gradient in gradients), tail])
            rpc.rpc_sync("server", push, (index, message.cpu()))


def main():
    global server
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    if not rpc.is_available():
        sys.stderr.write(f"{Path(__file__).name}: this torch is built without torch.distributed.rpc\n")
        raise SystemExit(3)
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    num_trainers = world_size - 1
    if num_trainers < 1:
        raise SystemExit("start it with torchrun and 2 or more ranks: rank 0 is the server, the others are trainers")
    loopback = next(interface for _, interface in socket.if_nameindex() if interface.startswith("lo"))
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # the default is an address that the network can reach
        os.environ.setdefault(name, loopback)
    train_data, eval_data = load(dtype)
    model = build().to(dtype)
    if rank == 0:
        server = Server(model, num_trainers)  # before a trainer can call it
    # torchrun passes address and ranks in the environment. The timeout ends a call to a process that hangs.
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=world_size + 1, rpc_timeout=300)
    name = "server" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank > 0:
        cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        train(model.to(device), train_data, rank - 1, num_trainers, device)
    rpc.shutdown()  # waits until all trainers have called it
    if rank == 0:
        for epoch, losses in enumerate(torch.cat(server.losses).view(EPOCHS, -1)):
            print_losses(epoch, losses, every_update=args.float64)
        print(f"top1 {count_correct(model, eval_data, torch.device('cpu')).item() / len(eval_data):.4f}")


if __name__ == "__main__":
    main()
