"""Find this machine's GPUs without torch, and divide them among the nodes: no two nodes share a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddpjob_operator.job.wording import count

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU, once the driver is loaded
NVIDIA_SMI_SECONDS = 20.0  # without the persistence daemon, waking eight GPUs takes the driver seconds


class TooFewGpusError(Exception):
    """The job requests more GPUs than this process may use."""


def visible(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES (indices or UUIDs). May take seconds."""
    environ = os.environ if environ is None else environ
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None and allowed.strip() in ("", "-1"):  # the usual values for no GPU
        return []
    machine = installed(environ)
    return machine if allowed is None else permitted(allowed, machine)


def permitted(allowed: str, machine: Sequence[str]) -> list[str]:
    """Return the devices of a CUDA_VISIBLE_DEVICES. As in CUDA, an invalid entry hides itself and all later entries. If
    no GPU was found, indices are not checked, because ROCm uses the variable too."""
    devices: list[str] = []
    for entry in (part.strip() for part in allowed.split(",")):
        if re.fullmatch(r"(GPU|MIG)-[\w/.-]+", entry):
            device = entry
        elif re.fullmatch(r"\d{1,4}", entry, re.ASCII) and (not machine or int(entry) < len(machine)):
            device = str(int(entry))
        else:
            break
        if device in devices:
            return []  # CUDA shows no device if the list names a device twice (torch.cuda, _parse_visible_devices)
        devices.append(device)
    return devices


def installed(environ: Mapping[str, str]) -> list[str]:
    """Return the machine's GPUs by index, or by UUID if some have MIG slices; [] without a working driver."""
    # Ignore errors: nvidia-smi fails or hangs with a mismatched driver, and some images lack it.
    with suppress(OSError, subprocess.SubprocessError):
        program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath)) or ""
        quiet = subprocess.DEVNULL
        listing = subprocess.check_output(
            [program, "-L"], env=dict(environ), stdin=quiet, stderr=quiet, timeout=NVIDIA_SMI_SECONDS
        )
        return parse_listing(listing.decode(errors="replace"))
    with suppress(OSError):
        return [str(index) for index, _ in enumerate(DRIVER_GPUS.iterdir())]
    return []


def parse_listing(listing: str) -> list[str]:
    """Return the devices in the output of `nvidia-smi -L`. A GPU in MIG mode is usable only through its slices, which
    have UUIDs but no index. Then whole GPUs are named by UUID too, because CUDA does not accept a mixture."""
    gpus = re.findall(r"^GPU (\d+):.*?\(UUID: (GPU-[^)]+)\)((?:\n\s+MIG .*)*)", listing, re.MULTILINE)
    if not any(slices for _, _, slices in gpus):
        return [index for index, _, _ in gpus]
    devices: list[str] = []
    for _, uuid, slices in gpus:
        devices += re.findall(r"\(UUID: (MIG-[^)]+)\)", slices) or [uuid]
    return devices


def share(gpus: Sequence[str], nodes: int, per_node: int) -> list[list[str]]:
    """Return the GPUs of each node, each GPU at most once. Raise TooFewGpusError. per_node: GPUs per node; may be 0."""
    wanted = nodes * per_node
    if wanted > len(gpus):
        raise TooFewGpusError(
            f"the job requests {count(wanted, 'GPU')} ({count(nodes, 'node')} x {per_node}), but this machine "
            f"has {len(gpus)} for it. Run it on the CPU with --cpu, or request fewer: --nodes, or the "
            "GPU limit of the trainer container."
        )
    return [list(gpus[node * per_node : (node + 1) * per_node]) for node in range(nodes)]
