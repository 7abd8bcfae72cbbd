"""Functions in plain PyTorch that are added to a port, each only if the port calls it.

They call torch.distributed; idioms.py replaces these calls by those of Accelerate and Fabric.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["HELPERS", "LIBRARY_HELPERS", "helper_text", "silencing_lines"]

SETUP = '''
def setup():
    """Join the other processes of torchrun, each on its own device; only rank 0 prints. Plain python is one process."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")
'''

SILENT = '''
class Silent:
    """Takes the place of a logger on the other ranks."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __fspath__(self):  # writer.log_dir: an empty folder of this rank
        return tempfile.mkdtemp()
'''

SHARED_SEED = '''
def shared_seed():
    """The seed of rank 0."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    dist.broadcast(seed, 0)
    return seed.item()
'''

SAME_SEED = '''
def same_seed():
    """Seed all ranks with rank 0's seed, which differs in each run."""
    seed = shared_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
'''

OWN_NOISE = '''
def own_noise():
    """Let each rank draw its own random numbers from here on; rank 0 keeps its seed."""
    if dist.get_rank() != 0:
        torch.manual_seed(torch.initial_seed() + dist.get_rank())
'''

RANK_0_FIRST = '''
def rank_0_first(make):
    """What a function that downloads returns: rank 0 calls it first, then the others, who find the files."""
    if dist.get_rank() != 0:
        dist.barrier()
    made = make()
    if dist.get_rank() == 0:
        dist.barrier()
    return made
'''

SPLIT = '''
class RankBatches:
    """Each batch of a sampler, split over the ranks: together they read the batches that one process reads."""

    def __init__(self, batches, evaluates):
        self.batches, self.evaluates = batches, evaluates

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            part = batch[dist.get_rank() :: dist.get_world_size()]
            if part or not self.evaluates:
                yield part or batch  # fewer samples than ranks: the rest take all, whose mean is the same


def split(loader, evaluates=False):
    """The loader, which now reads this rank's part of each batch. Its batch_size stays that of all ranks."""
    if getattr(loader.sampler, "generator", loader) is None:  # a random sampler: one order for all ranks
        loader.sampler.generator = torch.Generator().manual_seed(shared_seed())
    batches = RankBatches(loader.batch_sampler, evaluates)
    object.__setattr__(loader, "batch_sampler", batches)  # a plain assignment is refused, but no batch was read yet
    return loader
'''

TORCH_SAMPLER = '''
class EpochSampler(torch.utils.data.DistributedSampler):
    """A DistributedSampler that shuffles anew in each epoch, without calls of set_epoch."""

    def __iter__(self):
        self.set_epoch(self.epoch + 1)
        return super().__iter__()


def split(loader, evaluates=False):
    """A loader of this rank's part of the dataset; an evaluation has each sample once."""
    if evaluates:
        sampler = range(dist.get_rank(), len(loader.dataset), dist.get_world_size())
    else:
        is_shuffled = isinstance(loader.sampler, torch.utils.data.RandomSampler)
        sampler = EpochSampler(loader.dataset, shuffle=is_shuffled, seed=shared_seed())
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_size=max(1, loader.batch_size // dist.get_world_size()),
        sampler=sampler,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
'''

PART = '''
def part(*batches):
    """This rank's part of tensors, or of the tensors in dictionaries, that all ranks have."""
    parts = []
    for batch in batches:
        if isinstance(batch, dict):
            batch = dict(zip(batch, map(part, batch.values())))
        else:
            batch = batch[dist.get_rank() :: dist.get_world_size()]
        parts.append(batch.contiguous() if torch.is_tensor(batch) else batch)  # for view()
    return parts if len(parts) > 1 else parts[0]
'''

OWN_SEQUENCES = '''
def own_sequences(tensors, dim):
    """This rank's part of the sequences along a dimension of a tensor, or of each tensor of a tuple."""
    if isinstance(tensors, (tuple, list)):
        return type(tensors)(own_sequences(tensor, dim) for tensor in tensors)
    own = torch.arange(dist.get_rank(), tensors.size(dim), dist.get_world_size(), device=tensors.device)
    return tensors.index_select(dim, own)
'''

PARALLEL = '''
def parallel(model):
    """The model, whose gradients are averaged over the ranks."""
    return torch.nn.parallel.DistributedDataParallel(model{options})
'''

PARALLEL_NORM = '''
def parallel(model):
    """The model, whose gradients are averaged over the ranks; batch norm takes the samples of all ranks on CUDA."""
    is_cuda = next(model.parameters()).is_cuda
    if is_cuda:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    wrapper = torch.nn.parallel.DistributedDataParallel(model{options})

    def share_running_means(*_):
        for buffer in model.buffers():
            dist.broadcast(buffer.data, 0)

    if not is_cuda:  # each rank normalizes its own samples
        wrapper.register_forward_hook(share_running_means)
    return wrapper
'''

SHARD = '''
def shard(model, *blocks):
    """Split the parameters of a model over the ranks. Each block is gathered when it computes, and freed after it."""
{convert}    for tensor in [*model.parameters(), *model.buffers()]:  # all ranks begin with those of rank 0
        dist.broadcast(tensor.data, 0)
    for module in [*blocks, model]:
        fully_shard(module)
'''

SAVE_WHOLE = '''
def whole(value):
    """The value, in which each sharded tensor is whole and on the CPU: a collective of all ranks."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(each) for each in value)
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def save_whole(content, *args, **kwargs):
    """torch.save on rank 0, with whole tensors."""
    content = whole(content)
    if dist.get_rank() == 0:
        torch.save(content, *args, **kwargs)
'''

MEAN = '''
def mean_over_ranks(loss, count):
    """The loss of the whole batch, from the mean of `count` terms here; DDP averages its gradient to the whole one."""
    count = torch.as_tensor(count, dtype=loss.dtype, device=loss.device)
    loss = torch.where(count == 0, loss.nan_to_num(), loss)  # a mean over no terms is nan
    sums = torch.stack([loss.detach() * count, count])
    dist.all_reduce(sums)
    share = loss * (count * dist.get_world_size() / sums[1])
    return share + (sums[0] / sums[1] - share.detach())
'''

SUM = '''
def sum_over_ranks(loss):
    """The loss of the whole batch, from the sum here; DDP averages its gradient to the whole one."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    share = loss * dist.get_world_size()
    return share + (total - share.detach())
'''

ADD = '''
def add_over_ranks(*numbers):
    """The sums over the ranks of numbers that each rank has counted."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    dist.all_reduce(sums)
    sums = [total.to(n.device, n.dtype) if torch.is_tensor(n) else type(n)(total) for n, total in zip(numbers, sums)]
    return sums if len(sums) > 1 else sums[0]
'''

SYNC_BATCH_NORMS = '''
def sync_batch_norms(model):
    """Let batch norm take the samples of all ranks on CUDA; elsewhere, share rank 0's running means."""
    if {device}.type == "cuda":
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return

    def share_running_means(module, *_):
        if module.training and torch.is_grad_enabled():  # not in evaluations, which ranks may do in other numbers
            for buffer in module.buffers():
                value = buffer.data
                value.copy_(dist.broadcast(value, 0))

    model.register_forward_hook(share_running_means)
'''

LIBRARY_SEED = '''
def shared_seed():
    """The seed of rank 0."""
    total = torch.tensor(torch.initial_seed() % 2**63 if dist.get_rank() == 0 else 0, device={device})
    dist.all_reduce(total)
    return total.item()
'''

LIBRARY_FIRST = '''
def rank_0_first(make):
    """What a function that downloads returns: rank 0 calls it first, then the others, who find the files."""
    with rank_0():
        return make()
'''

# in the order of a port
HELPERS = {
    "setup": SETUP,
    "Silent": SILENT,
    "shared_seed": SHARED_SEED,
    "same_seed": SAME_SEED,
    "own_noise": OWN_NOISE,
    "rank_0_first": RANK_0_FIRST,
    "split": SPLIT,
    "part": PART,
    "own_sequences": OWN_SEQUENCES,
    "parallel": PARALLEL,
    "sync_batch_norms": SYNC_BATCH_NORMS,
    "shard": SHARD,
    "save_whole": SAVE_WHOLE,
    "mean_over_ranks": MEAN,
    "sum_over_ranks": SUM,
    "add_over_ranks": ADD,
}

# the helpers that are shorter with Accelerate and Fabric
LIBRARY_HELPERS = {"shared_seed": LIBRARY_SEED, "rank_0_first": LIBRARY_FIRST}

_LEAVES_OUT = """            if len(batch) < dist.get_world_size() and not self.evaluates:
                continue  # fewer samples than ranks: left out, because a sum would count some of them twice
            if part:
                yield part
"""


def silencing_lines(has_logging: bool, has_wandb: bool) -> list[str]:
    """Return the lines for ranks other than 0, so that only rank 0 logs."""
    return [
        *(["logging.disable()"] if has_logging else []),
        *(['os.environ["WANDB_MODE"] = "disabled"'] if has_wandb else []),
    ]


def helper_text(
    names: set[str],
    *,
    has_batch_norm: bool,
    finds_unused: bool,
    sums: bool,
    has_numpy: bool,
    has_logging: bool = False,
    has_wandb: bool = False,
    reseeded: Collection[str] = (),
    sampler: str = "batches",
    device: str = "",
) -> str:
    """Return the functions of these names, two empty lines apart.

    has_batch_norm  batch norm of the model takes the samples of all ranks
    finds_unused    some parameters have no gradient in some updates
    sums            the loss is a sum over samples
    has_numpy       numpy's random numbers are seeded, too
    has_logging     the script uses logging, of which only rank 0's is shown
    has_wandb       the script logs to Weights & Biases
    reseeded        "random" and "numpy" if each rank draws its own numbers from them in training
    sampler         "batches" or "torch", as in `Choice`
    device          the device of the library's object, such as "accelerator.device"; "" without a library
    """
    if names & {"same_seed", "split"}:
        names = names | {"shared_seed"}
    options = ", find_unused_parameters=True" if finds_unused else ""
    texts = {**HELPERS, **(LIBRARY_HELPERS if device else {})}
    texts = {name: text.replace("{device}", device) for name, text in texts.items()}
    texts["parallel"] = (PARALLEL_NORM if has_batch_norm else PARALLEL).replace("{options}", options)
    convert = """    if next(model.parameters()).is_cuda:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""
    if "shard" in names:
        texts = {name: text.replace("DDP averages", "FSDP averages") for name, text in texts.items()}
    texts["shard"] = SHARD.replace("{convert}", convert if has_batch_norm else "")
    if sampler == "torch":
        texts["split"] = TORCH_SAMPLER
    elif sums:
        start = texts["split"].index("            if part or not self.evaluates:")
        end = texts["split"].index("\n\n\ndef split")
        texts["split"] = texts["split"][:start] + _LEAVES_OUT.rstrip("\n") + texts["split"][end:]
    texts["setup"] += "".join(f"        {line}\n" for line in silencing_lines(has_logging, has_wandb))
    if "random" in reseeded:
        texts["own_noise"] += "        random.seed(torch.initial_seed())\n"
    if "numpy" in reseeded:
        texts["own_noise"] += "        np.random.seed(torch.initial_seed() % 2**32)\n"
    if not has_numpy:
        texts["same_seed"] = texts["same_seed"].replace("    np.random.seed(seed)\n", "")
    return "\n\n".join(text.rstrip("\n") for name, text in texts.items() if name in names).lstrip("\n")
