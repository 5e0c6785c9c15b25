"""All rules, in the order of docs/check.md: the table behind the command, its documentation and its tests."""

from __future__ import annotations

from ddpjob_operator.check import checkpoints, data, gradients, groups, ranks, starting, steps
from ddpjob_operator.check.rule import Rule

RULES = (
    Rule(
        "rank-is-local-rank",
        "error",
        "The local rank starts from 0 on every node, so several processes claim rank 0: the group never forms, or "
        "forms once per node.",
        'dist.init_process_group("nccl", rank=local_rank, world_size=world_size)',
        'dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=world_size)',
        ranks.rank_is_local_rank,
    ),
    Rule(
        "device-is-global-rank",
        "error",
        "GPUs are numbered from 0 on each node: rank 8 of a job with 8 GPUs per node belongs on GPU 0 of the second.",
        'rank = int(os.environ["RANK"])\nmodel = DDP(model.to(rank), device_ids=[rank])',
        'local_rank = int(os.environ["LOCAL_RANK"])\nmodel = DDP(model.to(local_rank), device_ids=[local_rank])',
        ranks.device_is_global_rank,
    ),
    Rule(
        "set-device-missing",
        "warning",
        "Without a current device, `.cuda()` of every process on a node means GPU 0: nccl refuses two ranks on one "
        "GPU, or its memory runs out.",
        "model.cuda()",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\nmodel.cuda()',
        ranks.set_device_missing,
    ),
    Rule(
        "collective-on-one-rank",
        "error",
        "A collective ends when all ranks have called it. If only some call it, they wait until the timeout.",
        "if rank == 0:\n    dist.all_reduce(loss)\n    print(loss)",
        "dist.all_reduce(loss)\nif rank == 0:\n    print(loss)",
        ranks.collective_on_one_rank,
    ),
    Rule(
        "uneven-steps",
        "error",
        "Each step of DDP and each collective waits for all ranks. If one rank makes fewer of them, the others wait "
        "for it until the timeout.",
        "for step in range(20 if rank == 0 else 30):\n    dist.all_reduce(loss)",
        "for step in range(20):\n    dist.all_reduce(loss)",
        steps.uneven_steps,
    ),
    Rule(
        "gradients-not-averaged",
        "error",
        "model.parameters() yields torch.nn.Parameter, so `type(param) is torch.Tensor` is never true: no gradient is "
        "averaged, every rank trains a model of its own, and no error is raised.",
        "for param in model.parameters():\n    if type(param) is torch.Tensor:\n        dist.all_reduce(param.grad)",
        "for param in model.parameters():\n    dist.all_reduce(param.grad)",
        gradients.gradients_not_averaged,
    ),
    Rule(
        "sampler-missing",
        "warning",
        "Without a sampler each rank trains on all samples: four GPUs do four times the work of one in an epoch.",
        "loader = DataLoader(dataset, batch_size=64, shuffle=True)",
        "loader = DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))",
        data.sampler_missing,
    ),
    Rule(
        "set-epoch-missing",
        "warning",
        "A DistributedSampler shuffles by seed and epoch. Without set_epoch all epochs have the same order.",
        "for epoch in range(epochs):\n    for batch in loader: …",
        "for epoch in range(epochs):\n    sampler.set_epoch(epoch)\n    for batch in loader: …",
        data.set_epoch_missing,
    ),
    Rule(
        "shuffle-with-sampler",
        "error",
        "A DataLoader takes its order from the sampler or shuffles itself: both together raise a ValueError.",
        "DataLoader(dataset, shuffle=True, sampler=sampler)",
        "DataLoader(dataset, sampler=sampler)",
        data.shuffle_with_sampler,
    ),
    Rule(
        "batch-size-is-float",
        "error",
        "`/` gives a float, and DataLoader refuses it with a ValueError, after the job has been given its GPUs.",
        "DataLoader(dataset, batch_size=128 / world_size)",
        "DataLoader(dataset, batch_size=128 // world_size)",
        data.batch_size_is_float,
    ),
    Rule(
        "batch-size-not-divided",
        "warning",
        "DataLoader's batch size is that of one rank: a total that is not divided grows with the number of ranks, and "
        "the learning rate no longer fits.",
        "DataLoader(dataset, batch_size=args.global_batch_size, sampler=sampler)",
        "DataLoader(dataset, batch_size=args.global_batch_size // dist.get_world_size(), sampler=sampler)",
        data.batch_size_not_divided,
    ),
    Rule(
        "partitioner-unseeded",
        "error",
        "Each rank divides the data by itself. Without a common seed each divides it differently: some samples are in "
        "two parts, others in none, and no error is raised.",
        "indices = list(range(len(data)))\nRandom().shuffle(indices)\npart = indices[rank::world_size]",
        "parts = ddpjob.DataPartitioner(data, fractions, seed=7)\npart = parts.use(rank)",
        data.partitioner_unseeded,
    ),
    Rule(
        "download-on-every-rank",
        "warning",
        "All processes of a node download into one folder at once, and one may unpack what another is still writing.",
        "dataset = datasets.MNIST(root, download=True)",
        "if local_rank == 0:\n    datasets.MNIST(root, download=True)\ndist.barrier()\ndataset = datasets.MNIST(root)",
        data.download_on_every_rank,
    ),
    Rule(
        "save-on-every-rank",
        "warning",
        "All ranks hold the same parameters. If all write them into one file at once, the file may be damaged.",
        'torch.save(model.module.state_dict(), "model.pt")',
        'if rank == 0:\n    torch.save(model.module.state_dict(), "model.pt")',
        checkpoints.save_on_every_rank,
    ),
    Rule(
        "save-whole-module",
        "warning",
        "A pickled module names the classes of your files and holds the DDP wrapper: it loads only with "
        "weights_only=False, and not after a rename.",
        'torch.save(model, "model.pt")',
        'torch.save(model.module.state_dict(), "model.pt")',
        checkpoints.save_whole_module,
    ),
    Rule(
        "load-without-map-location",
        "warning",
        "torch.load puts tensors on the device that they were saved from: all ranks of a node load onto GPU 0, whose "
        "memory may not suffice.",
        'state = torch.load("model.pt")',
        'state = torch.load("model.pt", map_location="cpu")',
        checkpoints.load_without_map_location,
    ),
    Rule(
        "master-overwritten",
        "error",
        "The job sets MASTER_ADDR and MASTER_PORT to the address of rank 0. A node with another address waits for "
        "itself, and under torchrun nothing listens on another port.",
        'os.environ["MASTER_ADDR"] = "localhost"',
        'os.environ.setdefault("MASTER_ADDR", "localhost")',
        groups.master_overwritten,
    ),
    Rule(
        "master-port-fixed",
        "warning",
        "If two jobs on one machine use the same port, the second fails, or joins the group of the first.",
        'os.environ["MASTER_PORT"] = "29500"',
        'os.environ.setdefault("MASTER_PORT", "29500")',
        groups.master_port_fixed,
    ),
    Rule(
        "tcp-under-torchrun",
        "error",
        "torchrun tells its processes that its agent serves the store, so with tcp:// none of them opens one, and they "
        "wait until the timeout (torch 2.13).",
        'dist.init_process_group("gloo", init_method="tcp://node-0:23456", rank=rank, world_size=world_size)',
        'dist.init_process_group("gloo")',
        groups.tcp_under_torchrun,
    ),
    Rule(
        "file-not-shared",
        "error",
        "With file:// the rendezvous is a file: nodes that share no folder each wait at their own.",
        'dist.init_process_group("gloo", init_method="file:///tmp/meet", rank=rank, world_size=world_size)',
        'dist.init_process_group("gloo")',
        groups.file_not_shared,
    ),
    Rule(
        "backend-mpi",
        "error",
        "The backend mpi needs a PyTorch that was built with MPI, which no published wheel is.",
        'dist.init_process_group("mpi")',
        'dist.init_process_group("gloo")',
        groups.backend_mpi,
    ),
    Rule(
        "nccl-without-gpu",
        "error",
        "nccl moves data between GPUs only: in a job whose pods have none the group does not form.",
        'dist.init_process_group("nccl")',
        'dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
        groups.nccl_without_gpu,
    ),
    Rule(
        "barrier-without-timeout",
        "warning",
        "A barrier on gloo waits 30 minutes for a missing rank, and its error does not name it. That may be too short "
        "while one rank prepares the data.",
        'dist.init_process_group("gloo")\nif rank == 0:\n    preprocess(data)\ndist.barrier()',
        'dist.init_process_group("gloo", timeout=timedelta(hours=6))\n'
        "if rank == 0:\n    preprocess(data)\ndist.barrier()",
        groups.barrier_without_timeout,
    ),
    Rule(
        "monitored-barrier-on-nccl",
        "error",
        "monitored_barrier needs send and recv on the CPU: it works with gloo only, and raises under nccl.",
        'dist.init_process_group("nccl")\ndist.monitored_barrier()',
        'dist.init_process_group("nccl")\ncpu = dist.new_group(backend="gloo")\ndist.monitored_barrier(cpu)',
        groups.monitored_barrier_on_nccl,
    ),
    Rule(
        "destroy-missing",
        "warning",
        "A script that has a function to destroy the group, and never calls it, exits with the group open, and nccl "
        "warns at each exit. A script without such a function is not reported.",
        "def cleanup():\n    dist.destroy_process_group()\n\ntrain()",
        "try:\n    train()\nfinally:\n    cleanup()",
        groups.destroy_missing,
    ),
    Rule(
        "isend-without-wait",
        "warning",
        "isend and irecv only begin a transfer: until wait() returns the tensor must not be used, and the message of a "
        "rank that exits before is lost.",
        "dist.isend(tensor, dst=1)",
        "work = dist.isend(tensor, dst=1)\nwork.wait()",
        groups.isend_without_wait,
    ),
    Rule(
        "spawn-without-main-guard",
        "error",
        "A spawned process imports the script again. Without the guard it would spawn processes too, and Python raises "
        "a RuntimeError.",
        "mp.spawn(train, nprocs=4)",
        'if __name__ == "__main__":\n    mp.spawn(train, nprocs=4)',
        starting.spawn_without_main_guard,
    ),
    Rule(
        "spawn-of-itself",
        "error",
        "A function that spawns itself never trains: each of its processes starts more, until the node is full.",
        "def main(rank=0):\n    mp.spawn(main, nprocs=4)",
        "def main():\n    mp.spawn(train, nprocs=4)",
        starting.spawn_of_itself,
    ),
    Rule(
        "spawn-function-without-rank",
        "error",
        "mp.spawn passes the number of the process as the first argument, before args: a function without a parameter "
        "for it raises a TypeError in every process.",
        "def train(): …\nmp.spawn(train, nprocs=4)",
        "def train(rank): …\nmp.spawn(train, nprocs=4)",
        starting.spawn_function_without_rank,
    ),
    Rule(
        "argument-value-for-name",
        "error",
        "What follows the name in add_argument is another name of the same option: a number or a type there raises an "
        "error at the start.",
        'parser.add_argument("--local-rank", int(os.environ["LOCAL_RANK"]))',
        'parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))',
        starting.argument_value_for_name,
    ),
    Rule(
        "local-rank-one-spelling",
        "warning",
        "torch.distributed.launch passes --local-rank since torch 2.0 and passed --local_rank before: a script with "
        "only the old one, or with neither, exits with “unrecognized arguments” (exit code 2). The new one alone works "
        "with all versions that DDPJob supports. torchrun passes none, so it must not be required there.",
        'parser.add_argument("--local_rank", type=int)',
        'parser.add_argument("--local-rank", "--local_rank", type=int)',
        starting.local_rank_one_spelling,
    ),
    Rule(
        "launch-deprecated",
        "warning",
        "torch.distributed.launch warns at each start that it will be removed; torchrun takes the same options.",
        "command: [python, -m, torch.distributed.launch, train.py]",
        'command: [torchrun, train.py]        # train.py reads os.environ["LOCAL_RANK"]',
        starting.launch_deprecated,
    ),
)
