"""A loop with Accelerate: `Accelerator()` joins torchrun's group; two calls of ddpjob report progress and stop."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

import ddpjob

STEPS = 200
# The order of an epoch must depend on a seed, so that a restart in its middle continues with the same order.
seeded = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=seeded)
x = torch.linspace(0, 1, 640).unsqueeze(1)
data = torch.utils.data.TensorDataset(x, 3 * x + 1)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

folder = os.environ.get("SNAPSHOTS", "/snapshots") + "/state"
step = 0
if os.path.exists(f"{folder}/step"):
    accelerator.load_state(folder)
    with open(f"{folder}/step") as file:
        step = int(file.read())


def save(at):
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        with open(f"{folder}/step", "w") as file:
            file.write(str(at))


# Accelerate does not save the position within an epoch, so skip the batches that were trained before the stop.
left_out = step % len(loader)
for epoch in range(step // len(loader), -(-STEPS // len(loader))):
    loader.set_epoch(epoch)
    for a, b in accelerator.skip_first_batches(loader, left_out):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(a), b)
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        ddpjob.progress(step=step, total=STEPS, samples=8 * accelerator.num_processes, loss=loss)
        stop = ddpjob.should_stop(step)
        if stop or step % 50 == 0:
            save(step)
        if stop:
            raise ddpjob.Stopped(step)
        if step == STEPS:
            break
    left_out = 0
accelerator.print(f"done: {step} steps")
accelerator.end_training()  # leave the group cleanly: otherwise gloo's threads may abort a finished rank
