"""Rank 0 saves and all ranks load: a state dict with map_location, and a whole module with the options that it needs.

torchrun --nproc-per-node 2 trainer/examples/notes/blocks_save_load.py
"""

import os
import pickle
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp()] if rank == 0 else [""]
    dist.broadcast_object_list(folder, src=0)
    state, whole = (os.path.join(folder[0], name) for name in ("state.pt", "whole.pt"))
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"

    torch.manual_seed(rank)
    model = nn.Linear(16, 8).to(device)
    saved = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    if rank == 0:  # only one rank writes: several writers would damage the file
        torch.save(model.state_dict(), state)
        torch.save(model, whole)  # ddpjob: ignore[save-whole-module]
    dist.barrier()  # no rank reads the file before it is written
    # Without map_location every rank would put the tensors on the GPU that rank 0 saved from.
    model.load_state_dict(torch.load(state, map_location=device, weights_only=True))
    loaded = nn.utils.parameters_to_vector(model.parameters()).detach()
    of_rank_0 = saved.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(loaded, of_rank_0), "after loading, all ranks hold what rank 0 saved"
    assert rank == 0 or not torch.equal(loaded, saved), "and not what they had before"

    # A whole module is a pickle of its class. From 2.6 on torch.load refuses it unless its classes are declared safe.
    # With weights_only=False torch.load accepts a whole module, but the file may run any code.
    try:
        torch.load(whole, map_location=device)
    except pickle.UnpicklingError as error:
        refused = str(error).splitlines()[0]
    else:
        raise AssertionError("a whole module is not plain weights")
    with torch.serialization.safe_globals([nn.Linear]):
        named = torch.load(whole, map_location=device)
    trusted = torch.load(whole, map_location=device, weights_only=False)
    for copy in (named, trusted):
        assert torch.equal(nn.utils.parameters_to_vector(copy.parameters()).detach(), of_rank_0)
    dist.barrier()  # all ranks have read the files
    if rank == 0:
        print(f"state dict: {os.path.getsize(state)} bytes, loaded equal on {dist.get_world_size()} ranks", flush=True)
        print(f"whole module, weights_only=True: {refused[:90]}…", flush=True)
        os.remove(state)
        os.remove(whole)
        os.rmdir(folder[0])


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the default is 30 minutes
    main()
    dist.destroy_process_group()
