import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BASE_LR, BASE_BATCH = 4e-3, 16
LOCAL_BATCH, SAMPLES, WARMUP = 12, 1400, 5
DECAY_AT = (800, 1200)


class Melodies(Dataset):
    def __init__(self, count=140):
        g = torch.Generator().manual_seed(12)
        step = torch.randint(1, 4, (count, 1), generator=g)
        self.notes = (torch.randint(0, 24, (count, 1), generator=g) + step * torch.arange(13)) % 24

    def __len__(self):
        return len(self.notes)

    def __getitem__(self, i):
        return self.notes[i]


class Composer(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes = nn.Embedding(24, 32)
        self.rnn = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, 24)

    def forward(self, x):
        return self.out(self.rnn(self.notes(x))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    global_batch = LOCAL_BATCH * world
    lr = BASE_LR * math.sqrt(global_batch / BASE_BATCH)

    def factor(update):
        seen = update * global_batch
        warm = min(1.0, (update + 1) / WARMUP)
        return warm * 0.3 ** sum(seen >= at for at in DECAY_AT)

    torch.manual_seed(0)
    data = Melodies()
    sampler = DistributedSampler(data, seed=9)
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(sampler, LOCAL_BATCH, drop_last=True))
    model = DDP(Composer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    updates, epoch = math.ceil(SAMPLES / global_batch), 0
    done = 0
    while done < updates:
        sampler.set_epoch(epoch)
        for notes in loader:
            loss = nn.functional.cross_entropy(model(notes[:, :-1]).flatten(0, 1), notes[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done == updates:
                break
        if rank == 0:
            print(f"epoch {epoch}: {done * global_batch} samples, loss {loss.item():.4f}, lr {schedule.get_last_lr()[0]:.5f}")
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
