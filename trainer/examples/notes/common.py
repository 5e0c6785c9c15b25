"""Shared by all notes: a tiny model, its data, and four steps of DDP. Each script starts the processes in its own way.

Every number is a binary fraction with few digits, so each sum is exact in any order. On 1, 2 or 4 processes, and on CPU
or GPU, the parameters are equal to the last bit. In a real training the last bits differ.
"""

import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEED, SAMPLES, GLOBAL_BATCH, EPOCHS = 7, 32, 16, 2


def tiny_model() -> nn.Module:
    """Return a model with 136 parameters that are multiples of 1/64."""
    torch.manual_seed(SEED)
    model = nn.Linear(16, 8, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 64).round() / 64)
    return model


def tiny_data() -> TensorDataset:
    """Return inputs and targets that are small integers."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randint(-2, 3, (SAMPLES, 16), generator=generator)
    targets = torch.randint(-4, 5, (SAMPLES, 8), generator=generator)
    return TensorDataset(inputs.double(), targets.double())


def train(device: torch.device | str = "cpu") -> None:
    """Train in the existing process group. Rank 0 prints the parameters' hash and the number of processes."""
    model = DistributedDataParallel(tiny_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = tiny_data()
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # otherwise every epoch would have the same order
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"PARAMS {params_sha256(model)} world {dist.get_world_size()}", flush=True)
    # A process that ends right after the last all-reduce of a gloo group may abort or hang, because gloo's threads are
    # still working (torch 2.13; docs/dev/upstream.md, Groups). A real training evaluates and saves meanwhile, and
    # ddpjob.init() makes the exit wait for these threads.
    time.sleep(0.1)


def params_sha256(model: nn.Module) -> str:
    """Return a hash of the parameters' bits."""
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
