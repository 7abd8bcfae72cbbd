import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 6))


def kd_loss(student, teacher, labels, t=2.0, alpha=0.7):
    soft = F.kl_div((student / t).log_softmax(-1), (teacher / t).log_softmax(-1), log_target=True, reduction="batchmean")
    return alpha * t * t * soft + (1 - alpha) * F.cross_entropy(student, labels)


def fit(step_fn, steps, label, rank):
    for step in range(steps):
        loss = step_fn(step)
        if rank == 0 and (step + 1) % 8 == 0:
            print(f"{label} step {step + 1} loss {loss:.4f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(33 + rank)
    g = torch.Generator().manual_seed(7 * rank + 1)

    def batch(n=16):
        x = torch.randn(n, 10, generator=g)
        return x, (x[:, :6] + 0.5 * x[:, 4:10]).argmax(1)

    teacher = DDP(mlp(64))
    opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)

    def teach(_):
        x, y = batch()
        loss = F.cross_entropy(teacher(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    fit(teach, 16, "teacher", rank)
    # the teacher leaves its wrapper, is equal on all ranks and is not trained any more
    teacher = teacher.module.eval().requires_grad_(False)
    student = mlp(12)
    student[0].bias.requires_grad_(False)  # frozen before DDP is made
    student = DDP(student)
    s_opt = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=1e-2)

    def distill(_):
        x, y = batch()
        with torch.no_grad():
            target = teacher(x)
        loss = kd_loss(student(x), target, y)
        s_opt.zero_grad()
        loss.backward()
        s_opt.step()
        return loss.item()

    fit(distill, 16, "student", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
