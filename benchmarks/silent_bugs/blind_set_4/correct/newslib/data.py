import torch


def corpus(count=120, length=10, vocab=40):
    g = torch.Generator().manual_seed(6)
    topic = torch.randint(0, 4, (count,), generator=g)
    words = torch.randint(0, vocab, (count, length), generator=g)
    common = torch.rand(count, length, generator=g) < 0.4
    return torch.where(common, topic.unsqueeze(1) * 10 + words % 10, words), topic


def batches(epoch, rank, world, size):
    words, topic = corpus()
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(epoch))
    usable = len(order) // (size * world) * size * world
    mine = order[:usable].view(-1, world, size)[:, rank]
    for rows in mine:
        yield words[rows], topic[rows]
