"""Lightning: one callback reports the progress, and saves when the job is told to stop."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer

from ddpjob.lightning import JobCallback


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.line(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


x = torch.linspace(0, 1, 640).unsqueeze(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 3 * x + 1), batch_size=8)
folder = os.environ.get("SNAPSHOTS", "/snapshots")
last = f"{folder}/last.ckpt"
trainer = Trainer(
    max_steps=200, strategy="ddp", accelerator="gpu" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["NNODES"]), default_root_dir=folder,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[JobCallback(last)],
)  # fmt: skip
trainer.fit(Line(), loader, ckpt_path=last if os.path.exists(last) else None)
print(f"done: {trainer.global_step} steps", flush=True)
