"""`init()`: find the other ranks, choose backend and device, leave the group cleanly. The script calls it first.

Works under torchrun and torch.distributed.launch, in processes of torch.multiprocessing.spawn and multiprocessing
(rank= and world_size=), as plain python with one process per node, and alone. The steps read from top to bottom in
`init`: place, backend and device, rendezvous, agreement, group.
"""

import contextlib
import faulthandler
import functools
import os
import re
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ddpjob import process
from ddpjob.errors import (
    ConfigurationError,
    DDPJobError,
    RendezvousError,
    SnapshotError,
    Stopped,
    UnsupportedError,
)
from ddpjob.group import stop, wait_for_store
from ddpjob.group.gloo_teardown import never_destroy, settle, settle_unless_at_exit
from ddpjob.reporting import termination
from ddpjob.reporting.progress import report_start
from ddpjob_core import stall_limits
from ddpjob_core.rank_info import RankInfo, on_node

TIMEOUT_SECONDS_MAX = 10**9  # 31 years
CLOSE_SECONDS = 10.0  # how long a finished rank waits for the others before it leaves without them
END_SECONDS = 2.0  # after a failure the process is ended after this many seconds, even if a destructor hangs
NCCL_ERRORS, TORCHRUNS_OWN, PYTORCHS_OWN = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "3"
_LEFT = "left/{}"  # key in the store, set when this rank has left the group cleanly


@dataclass(frozen=True)
class World:
    """This process's place in the group, returned by `init`. Use it as a context manager, or let the exit close it.

    rank, world_size              among all processes; local_rank, local_world_size: among those on this node.
    node_rank                     number of this node.
    device                        torch.device to train on: cuda:<n>, already the current one, or cpu.
    backend                       "nccl" or "gloo" (or "mpi" in a PyTorch that has it).
    attempt                       number of the job's attempt, from 1 (DDPJOB_ATTEMPT).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str
    attempt: int = 1
    timeout_step_seconds: float = field(default=2 * stall_limits.PAUSE_SECONDS, repr=False)

    @property
    def is_main(self) -> bool:
        """True for rank 0, which prints and saves."""
        return self.rank == 0

    def wrap(self, model: torch.nn.Module, **ddp_kwargs: Any) -> DistributedDataParallel:
        """Return the model on this rank's device, wrapped in DistributedDataParallel even if there is only one rank.

        ddp_kwargs are passed to DistributedDataParallel. device_ids is [device] on a GPU and absent on the CPU, because
        torch/nn/parallel/distributed.py refuses it for CPU modules.
        """
        if self.device.type == "cuda":
            ddp_kwargs.setdefault("device_ids", [self.device.index])
        return DistributedDataParallel(model.to(self.device), **ddp_kwargs)

    def started(self) -> None:
        """Limit collectives to timeout_step_seconds from now on, because the first step is complete.

        `progress` and `accumulate` call this. A script without them calls it once after its first optimizer step.
        """
        if (group := _group_of(self)) is not None:
            group.use_step_timeout()

    def close(self) -> None:
        """Leave the group: wait for the other ranks (at most 10 s), then destroy the group. Safe to call twice."""
        if (group := _group_of(self)) is not None:
            _leave(group)

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (group := _group_of(self)) is None:
            return
        if kind is None or isinstance(error, Stopped) or (isinstance(error, SystemExit) and not error.code):
            _leave(group)
        else:
            group.log_time_out(error)
            group.broken = True  # do not wait at the exit for the peers, because they are blocked in a collective
            if isinstance(error, SystemExit):
                termination.tell(error)  # at the exit of the interpreter the exception would not be visible


def init(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    device: str | None = None,
    timeout_start_seconds: float = 300.0,
    timeout_step_seconds: float | None = None,
) -> World:
    """Join the process group and return this process's World; a second call returns the same one.

    backend      "nccl", "gloo" or "auto"; default DDPJOB_BACKEND, else auto: nccl if this process sees a CUDA
                 device, else gloo. "mpi" works only in a PyTorch that was built with MPI.
    init_method  "env://" (default), "tcp://host:port" (also under torchrun) or "file:///path/on/a/shared/folder".
                 Without init_method and without RANK this process is alone and uses no network.
    rank, world_size, local_rank  for processes that the script starts itself; default RANK, WORLD_SIZE, LOCAL_RANK.
    device       "cpu" or "cuda"; default cuda if this process sees a CUDA device. Its index is local_rank modulo the
                 number of visible devices; under nccl every rank needs its own.
    timeout_start_seconds  limit for the rendezvous. Collectives before the end of the first step have this limit or
                 timeout_step_seconds, whichever is longer, because imports, downloads and compilation differ between
                 nodes.
    timeout_step_seconds   limit for each collective after the first step (World.started). Default: an hour; 3 hours
                 under ddprun or with an operator, which find a hang much sooner and know of a declared `pause`. It must
                 not be shorter than the longest pause of a rank, because the others wait for it in a collective.

    Raises ConfigurationError (a variable or argument is invalid), UnsupportedError (not possible with this PyTorch or
    on this machine) or RendezvousError (the ranks did not find each other in time).
    """
    if (joined := active()) is not None:
        return joined
    if timeout_step_seconds is None:
        timeout_step_seconds = default_timeout_seconds(os.environ)
    start = _time_limit("timeout_start_seconds", timeout_start_seconds)
    step = _time_limit("timeout_step_seconds", timeout_step_seconds)
    place = find_place(os.environ, init_method, rank, world_size, local_rank)
    backend, chosen = choose(backend, device, place, os.environ)
    if dist.is_initialized():
        backend, store = dist.get_backend(), None  # take part in the group that the script made
    else:
        store = _join(init_method, place, backend, chosen, start, max(start, step))
    if backend == "gloo":
        never_destroy(dist.distributed_c10d._get_default_group())
    attempt = _integer(os.environ, "DDPJOB_ATTEMPT", 1)
    world = World(*place, chosen, backend, attempt, timeout_step_seconds)
    process.current.group = _Group(world, place, store)
    process.current.groups_joined += 1
    if not process.current.leaves_at_exit:
        process.current.leaves_at_exit = True
        process.at_exit(_leave_at_exit, 10)
    report_start()
    return world


def _time_limit(name: str, seconds: Any) -> timedelta:
    """Return the limit. Raise ConfigurationError if it is invalid: with 0 the first collective would fail, and torch's
    message for infinity or text does not name the argument."""
    if isinstance(seconds, (int, float)) and 0 < seconds <= TIMEOUT_SECONDS_MAX:
        return timedelta(seconds=seconds)
    raise ConfigurationError(f"{name}: {seconds!r} must be a number of seconds above 0, at most {TIMEOUT_SECONDS_MAX}.")


def default_timeout_seconds(environ: Mapping[str, str]) -> float:
    """Return the default limit for a collective: the longest pause that stall_limits.py allows."""
    if not (environ.get("DDPJOB_BEATS") or environ.get("DDPJOB_STATUS_URL")):
        return 2 * stall_limits.PAUSE_SECONDS  # an hour: without ddprun or an operator only this limit ends a hang
    stall = environ.get("DDPJOB_STALL_TIMEOUT", "")
    pause_seconds = stall_limits.LONGEST * int(stall) if stall.isdecimal() else 0
    return max(stall_limits.UNSEEN_PAUSE_SECONDS, pause_seconds)


def active() -> World | None:
    """Return the World of this process; None before `init`, after `close` and in a forked child."""
    return getattr(process.current.group, "world", None)


def rank_in_group(otherwise: str) -> tuple[int, int]:
    """Return this process's rank and the size of its group, also of a group that the script made; (0, 1) for a single
    process. Raise ConfigurationError if there are other ranks but no group.

    otherwise: what the text of this error names as an alternative to `init`.
    """
    if process.current.group is not None or process.torch_group() is not None:
        place = process.place()
        return place.rank, place.world_size
    # ddprun sets WORLD_SIZE to the present number of ranks, but DDPJOB_WORLD_SIZE is the largest one of an elastic job.
    name = "WORLD_SIZE" if os.environ.get("WORLD_SIZE") else "DDPJOB_WORLD_SIZE"
    if (size := process.number(name, 1)) > 1:
        # Do not return rank 0 of 1: each rank would train alone on all samples and end with 0, unnoticed.
        raise ConfigurationError(
            f"{name}: {size} and there is no process group, so this process cannot know its share. "
            f"Call ddpjob.init() first, or {otherwise}."
        )
    return 0, 1


def store_of(world: World | None) -> Store | None:
    """Return the key-value store of this World's group; None after the group was left."""
    return getattr(_group_of(world), "store", None)


def _group_of(world: World | None) -> "_Group | None":
    group: _Group | None = process.current.group
    return group if group is not None and group.world is world else None


# ---- the place ---------------------------------------------------------------------------------------------


def find_place(
    environ: Mapping[str, str],
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
) -> RankInfo:
    """Return the place from the arguments, the URL's query or the environment, in this order; otherwise rank 0 of 1."""
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank is None and world_size is None:
        rank, world_size = _from_query(init_method) or _from_environment(environ)
    if rank is None or world_size is None:
        raise ConfigurationError(f"rank: {rank}, world_size: {world_size}. Give both or neither.")
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank: {rank} must be at least 0 and less than the world size, {world_size} (rank= or RANK, "
            f"world_size= or WORLD_SIZE)."
        )
    return on_node(rank, world_size, functools.partial(_integer, environ), local_rank)


def _from_query(init_method: str | None) -> tuple[int, int] | None:
    """Parse tcp://host:port?rank=0&world_size=2 as torch.distributed.rendezvous does."""
    query = parse_qs(urlsplit(init_method or "").query)
    if "rank" not in query and "world_size" not in query:
        return None
    try:
        return int(query["rank"][0]), int(query["world_size"][0])
    except (KeyError, ValueError):
        raise ConfigurationError(f"init_method: {init_method!r} needs numbers for both rank and world_size.") from None


def _from_environment(environ: Mapping[str, str]) -> tuple[int, int]:
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    for there, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"), ("DDPJOB_WORLD_SIZE", "RANK")):
        # Refuse this, because each rank would train alone and end with 0, so nobody would notice.
        if environ.get(there) and (there == "RANK" or _integer(environ, there) > 1):
            raise ConfigurationError(
                f"{there}: {environ[there]} is set but {missing} is not: this process cannot know its place among the "
                f"others. Start it with torchrun, or pass rank= and world_size=, or set nprocPerNode: 1."
            )
    return 0, 1


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigurationError(f"{name}: {text!r} must be a whole number.") from None


# ---- backend and device ------------------------------------------------------------------------------------


def choose(
    backend: str | None, device: str | None, place: RankInfo, environ: Mapping[str, str]
) -> tuple[str, torch.device]:
    """Return backend and device of this process, and make the device the current one."""
    source = "backend" if backend else "DDPJOB_BACKEND"
    backend = (backend or environ.get("DDPJOB_BACKEND") or "auto").lower()
    if backend not in ("auto", "nccl", "gloo", "mpi"):
        raise ConfigurationError(f"{source}: {backend!r} is none of auto, nccl, gloo.")
    if device not in (None, "cpu", "cuda"):
        raise ConfigurationError(f"device: {device!r} is none of cpu, cuda; the index follows from LOCAL_RANK.")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if gpus and dist.is_nccl_available() else "gloo"
    _refuse_unavailable(source, backend, device, gpus)
    if not gpus:
        return backend, torch.device("cpu")
    if backend == "nccl" and place.local_rank >= gpus > 1:
        raise UnsupportedError(
            f"LOCAL_RANK: {place.local_rank} needs a GPU of its own under nccl, and this process sees {gpus}. "
            f"Start at most {gpus} processes on this node, or use backend gloo."
        )
    chosen = torch.device("cuda", place.local_rank % gpus)
    torch.cuda.set_device(chosen)
    return backend, chosen


def _refuse_unavailable(source: str, backend: str, device: str | None, gpus: int) -> None:
    if backend == "mpi" and not dist.is_mpi_available():
        raise UnsupportedError(
            f'{source}: "mpi" needs a PyTorch built with MPI; no published wheel has it. Use gloo (CPU) or nccl (GPU).'
        )
    if backend == "nccl" and not dist.is_nccl_available():
        raise UnsupportedError(
            f'{source}: "nccl" is not in this PyTorch {torch.__version__}. Use gloo, or a CUDA build.'
        )
    if not gpus and (backend == "nccl" or device == "cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "device is cpu" if device == "cpu" else f"CUDA_VISIBLE_DEVICES is {visible!r}"
        raise UnsupportedError(
            f'{source}: "{backend}", device: {device or "auto"}: this process sees no CUDA device ({because}). '
            f"Use gloo on the CPU, or give the process a GPU."
        )


# ---- rendezvous, agreement, group --------------------------------------------------------------------------


def _join(
    init_method: str | None, place: RankInfo, backend: str, device: torch.device, timeout: timedelta, longest: timedelta
) -> Store:
    """Form the group and return its store.

    timeout: for the rendezvous. longest: for collectives, because gloo of torch 2.4 cannot change it later.
    """
    where = init_method or _default_method(place)
    try:
        store = _rendezvous(where, place, timeout)
        _agree(store, place, backend, device)
        _wait_for_all(store, place, timeout)
        options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
        end_without_abort(os.environ)
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=longest, **options
        )
    except DDPJobError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        environ = os.environ  # for an error that names the address; torch's own often does not
        address = f"{where}, {environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}" if where == "env://" else where
        raise RendezvousError(
            f"rank {place.rank} of {place.world_size} did not meet the others at {address} (backend {backend}, limit "
            f"{timeout.total_seconds():g} s): {problem}. Check that all ranks run, and that the address is "
            f"rank 0's, or the folder shared by all."
        ) from error
    return store


def end_without_abort(environ: MutableMapping[str, str]) -> None:
    """Under ddprun let NCCL's errors end this process, as under torchrun, but without aborting the group first.

    After an abort the GPU continues with undefined buffers, which could then become part of the state in memory.
    """
    if environ.get("DDPJOB_MEMORY") and environ.get(NCCL_ERRORS) == TORCHRUNS_OWN:
        environ[NCCL_ERRORS] = PYTORCHS_OWN


def _default_method(place: RankInfo) -> str:
    if place.world_size == 1:
        return "alone"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigurationError(
                f"{name} is not set, and rank {place.rank} of {place.world_size} must find the others. Start with "
                f"torchrun, set MASTER_ADDR and MASTER_PORT, or pass init_method=."
            )
    _integer(os.environ, "MASTER_PORT")
    return "env://"


def _prefix() -> str:
    """Return a prefix with the attempt and ddprun's generation, so that a process of an earlier generation cannot
    join the new group. TORCHELASTIC_RESTART_COUNT cannot be part of it, because torchrun counts it per node."""
    environ = os.environ
    generation = environ.get("DDPJOB_GENERATION", "0")
    attempt = environ.get("DDPJOB_ATTEMPT", "1") + (f".{generation}" if generation != "0" else "")
    return f"ddpjob/{environ.get('DDPJOB_UID', '')}/{attempt}"


def _rendezvous(where: str, place: RankInfo, timeout: timedelta) -> Store:
    """Return a store in which keys of other groups are invisible."""
    if where == "alone":
        return HashStore()  # HashStore needs no port, and this rank is alone
    scheme = urlsplit(where).scheme
    if scheme == "file":
        return _store_in_file(where, place, timeout)
    if scheme == "tcp":
        store = _store_at_port(where, place, timeout)
    elif scheme == "env":
        wait_for_store.have_torch_wait_for_rank_0()
        store = next(rendezvous(where, place.rank, place.world_size, timeout=timeout))[0]
    else:
        raise ConfigurationError(f"init_method: {where!r} is none of env://, tcp://host:port, file:///path.")
    # The prefix also has the number of the group, because the store of a closed group may still be running here.
    return PrefixStore(f"{_prefix()}/{process.current.groups_joined}", store)


def _store_at_port(where: str, place: RankInfo, timeout: timedelta) -> Store:
    """Return the store: rank 0 serves it, and the other ranks connect.

    torch.distributed's own tcp:// makes every rank a client under torchrun (TORCHELASTIC_USE_AGENT_STORE in
    torch/distributed/rendezvous.py), even at a port where no agent listens. All ranks would then time out.
    """
    url = urlsplit(where)
    if url.hostname is None or url.port is None:
        raise ConfigurationError(f"init_method: {where!r} needs a host and a port, e.g. tcp://10.0.0.1:23456.")
    has_agent, agents_port = (os.environ.get(name) for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT"))
    serves = place.rank == 0 and not (has_agent == "True" and str(url.port) == agents_port)
    if not serves:
        wait_for_store.wait_until_served(url.hostname, url.port, timeout.total_seconds())
    return TCPStore(url.hostname, url.port, place.world_size, serves, timeout, multi_tenant=True)


def _store_in_file(where: str, place: RankInfo, timeout: timedelta) -> Store:
    path = urlsplit(where).path
    if not path or not os.path.isdir(os.path.dirname(path)):
        raise ConfigurationError(f"init_method: {where!r}: the folder {os.path.dirname(path)!r} does not exist.")
    store = FileStore(path, place.world_size)
    store.set_timeout(timeout)
    # After a crash the file has addresses of ended processes, and the next run would wait for them until it times out.
    # So each run has its own keys, and begins only if this rank left the group of the previous run cleanly.
    own = PrefixStore(_prefix(), store)
    run = own.add(f"joined/{place.rank}", 1)
    if run > 1 and not PrefixStore(f"run/{run - 1}", own).check([_LEFT.format(place.rank)]):
        raise RendezvousError(
            f"init_method: {where!r} was left by a run that did not end cleanly: rank {place.rank} had joined through "
            f"it before. Delete {path}, or give every run a file of its own."
        )
    return PrefixStore(f"run/{run}", own)


def _agree(store: Store, place: RankInfo, backend: str, device: torch.device) -> None:
    """Check that all ranks use rank 0's backend and, under nccl, a GPU each. Otherwise they would wait for each other
    until they time out."""
    if place.rank == 0:
        store.set("backend", backend)
    elif (of_rank_0 := store.get("backend").decode()) != backend:
        raise ConfigurationError(
            f"backend: rank {place.rank} uses {backend} and rank 0 {of_rank_0}. With auto this follows from the GPUs "
            f"that a process sees ({torch.cuda.device_count()} here): name the backend, or give every rank the same."
        )
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if backend == "nccl" else None
    if uuid is not None and store.add(f"gpu/{place.node_rank}/{uuid}", 1) > 1:
        raise UnsupportedError(
            f"LOCAL_RANK: {place.local_rank}: another rank of this node uses the same GPU ({device}), and nccl needs "
            f"one for each. Start fewer processes, or use backend gloo."
        )


def _wait_for_all(store: Store, place: RankInfo, timeout: timedelta) -> None:
    """Wait for all ranks. torch itself would wait for a missing rank for the time limit of collectives, maybe hours."""
    if store.add(f"rank {place.rank}", 1) > 1:
        raise RuntimeError("another process has the same rank")
    size = place.world_size  # part of the keys: ranks that expect another world size must not count as present
    if store.add(f"met of {size}", 1) == size:
        store.set(f"all {size} met", "1")
    store.wait([f"all {size} met"], timeout)


# ---- leave in order ----------------------------------------------------------------------------------------


@dataclass
class _Group:
    """The process group of this process, and its changing state."""

    world: World
    place: RankInfo
    store: Store | None  # None if the script made the group
    stepping: bool = False
    broken: bool = False
    time_out_logged: bool = False

    def use_step_timeout(self) -> None:
        """Use timeout_step_seconds for collectives that start from now on, under gloo and nccl."""
        if not self.stepping:
            self.stepping = True
            # torch 2.15 has a public function; the private one warns in that version, on every rank.
            change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            with contextlib.suppress(Exception):
                change(timedelta(seconds=self.world.timeout_step_seconds))

    def log_time_out(self, error: BaseException | None) -> None:
        """Name the limit that was reached and how to raise it, because torch's message has only milliseconds."""
        if isinstance(error, SystemExit):  # for example sys.exit(1) in an except block
            error = error.__cause__ or error.__context__
        waited = _TIMED_OUT.search(str(error)) if isinstance(error, RuntimeError) else None
        if waited is None or self.time_out_logged or int(waited[1]) != round(1000 * self.world.timeout_step_seconds):
            return
        self.time_out_logged = True
        process.log(
            f"rank {self.world.rank} has waited for another rank for the time-out of "
            f"{self.world.timeout_step_seconds:g} s (timeout_step_seconds of ddpjob.init). If that rank was at work, "
            f"raise the time-out; if not, the rank hangs or makes fewer steps."
        )


_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms")  # text of gloo's errors


def before_leaving(action: Callable[[], None]) -> None:
    """Register a bound method, for example one that finishes a save, to run before the group is left cleanly. The
    store still answers then."""
    process.current.before_leaving.append(weakref.WeakMethod(action))


def _leave_at_exit() -> None:
    """Leave the group cleanly if the script never closes it: gloo may abort a process that exits within its group."""
    group: _Group | None = process.current.group
    if group is None:
        return
    error = termination.ending()
    failed = error is not None and not isinstance(error, Stopped) and termination.exit_code(error) != 0
    if group.broken or failed:  # the peers are blocked in a collective
        group.log_time_out(error)
        _end_soon()
        return
    try:
        _leave(group)
    except SnapshotError as problem:
        stop.fail_at_exit(problem)
    except Exception as problem:  # at exit no caller can catch an exception
        termination.tell(problem)
        process.log(str(problem))


def _end_soon() -> None:
    """End with exit code 1 within 2 s after an exception, even if a destructor hangs. Otherwise no launcher would know
    of the failure.

    faulthandler's timer is a C thread, so it works even while a destructor holds the interpreter lock.
    """
    settle(failed=True)
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


def _leave(group: _Group) -> None:
    stop.leave()
    process.current.group, process.current.left = None, group.place
    actions, process.current.before_leaving = [method() for method in process.current.before_leaving], []
    try:
        for action in filter(None, actions):
            action()
    finally:
        if dist.is_initialized():
            wait_for_others(group, CLOSE_SECONDS if process.current.stopped_at is None else stop.STOPPED_CLOSE_SECONDS)
            settle_unless_at_exit()
            dist.destroy_process_group()


def wait_for_others(group: _Group, limit_seconds: float) -> None:
    """Wait at most `limit_seconds` until every rank is leaving.

    This uses the store, because a barrier ends the process under nccl if a lost peer never joins it.
    """
    store, world = group.store, group.world
    if store is None and process.current.stopped_at is not None:
        store = stop.store_of_group()  # in a group that the script made: rank 0 may still be writing a snapshot
    if store is None:
        return
    with contextlib.suppress(RuntimeError):  # the store is gone if rank 0, which serves it, has left
        store.set(_LEFT.format(world.rank), "1")
        stop.wait_for_all(store, world.rank, world.world_size, limit_seconds)
