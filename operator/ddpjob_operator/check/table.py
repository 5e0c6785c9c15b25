"""All rules: the one table behind the command, its documentation and its tests, in the order of docs/check.md."""

from __future__ import annotations

from ddpjob_operator.check import checkpoints, data, gradients, groups, ranks, starting, steps
from ddpjob_operator.check.rule import Rule

RULES = (
    Rule(
        "rank-is-local-rank",
        "error",
        "The local rank starts from 0 on every node: two processes claim rank 0, and the group never forms, or forms "
        "once per node.",
        'dist.init_process_group("nccl", rank=local_rank, world_size=world_size)',
        'dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=world_size)',
        ranks.rank_is_local_rank,
    ),
    Rule(
        "device-is-global-rank",
        "error",
        "GPUs are numbered on each node from 0: rank 8 of a job with 8 GPUs a node is on GPU 0 of the second.",
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
        "A collective ends when all ranks have called it: what only one calls waits until the time-out.",
        "if rank == 0:\n    dist.all_reduce(loss)\n    print(loss)",
        "dist.all_reduce(loss)\nif rank == 0:\n    print(loss)",
        ranks.collective_on_one_rank,
    ),
    Rule(
        "uneven-steps",
        "error",
        "Each step of DDP and each collective waits for all ranks. Where one makes fewer of them than the others, "
        "these wait for it until the time-out.",
        "for step in range(20 if rank == 0 else 30):\n    dist.all_reduce(loss)",
        "for step in range(20):\n    dist.all_reduce(loss)",
        steps.uneven_steps,
    ),
    Rule(
        "gradients-not-averaged",
        "error",
        "What model.parameters() gives is a torch.nn.Parameter, so `type(param) is torch.Tensor` never holds: no "
        "gradient is averaged, every rank trains a model of its own, and nothing says so.",
        "for param in model.parameters():\n    if type(param) is torch.Tensor:\n        dist.all_reduce(param.grad)",
        "for param in model.parameters():\n    dist.all_reduce(param.grad)",
        gradients.gradients_not_averaged,
    ),
    Rule(
        "sampler-missing",
        "warning",
        "Without a sampler each rank goes through all samples: four GPUs do four times the work of one for an epoch.",
        "loader = DataLoader(dataset, batch_size=64, shuffle=True)",
        "loader = DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))",
        data.sampler_missing,
    ),
    Rule(
        "set-epoch-missing",
        "warning",
        "A DistributedSampler shuffles by seed and epoch: where nobody tells it the epoch, all have the same order.",
        "for epoch in range(epochs):\n    for batch in loader: …",
        "for epoch in range(epochs):\n    sampler.set_epoch(epoch)\n    for batch in loader: …",
        data.set_epoch_missing,
    ),
    Rule(
        "shuffle-with-sampler",
        "error",
        "A DataLoader takes its order from the sampler or makes one itself: both together are a ValueError.",
        "DataLoader(dataset, shuffle=True, sampler=sampler)",
        "DataLoader(dataset, sampler=sampler)",
        data.shuffle_with_sampler,
    ),
    Rule(
        "batch-size-is-float",
        "error",
        "`/` gives a float, and DataLoader refuses it with a ValueError, after the job has got its GPUs.",
        "DataLoader(dataset, batch_size=128 / world_size)",
        "DataLoader(dataset, batch_size=128 // world_size)",
        data.batch_size_is_float,
    ),
    Rule(
        "batch-size-not-divided",
        "warning",
        "DataLoader's batch size is that of one rank: a total that is not divided grows with the job, and the learning "
        "rate fits no more.",
        "DataLoader(dataset, batch_size=args.global_batch_size, sampler=sampler)",
        "DataLoader(dataset, batch_size=args.global_batch_size // dist.get_world_size(), sampler=sampler)",
        data.batch_size_not_divided,
    ),
    Rule(
        "partitioner-unseeded",
        "error",
        "Each rank cuts the data by itself. Without a common seed each cuts another way: some samples are in two "
        "parts, others in none, and nothing says so.",
        "indices = list(range(len(data)))\nRandom().shuffle(indices)\npart = indices[rank::world_size]",
        "parts = ddpjob.DataPartitioner(data, fractions, seed=7)\npart = parts.use(rank)",
        data.partitioner_unseeded,
    ),
    Rule(
        "download-on-every-rank",
        "warning",
        "All processes of a node download into one folder at once, and one unpacks what another still writes.",
        "dataset = datasets.MNIST(root, download=True)",
        "if local_rank == 0:\n    datasets.MNIST(root, download=True)\ndist.barrier()\ndataset = datasets.MNIST(root)",
        data.download_on_every_rank,
    ),
    Rule(
        "save-on-every-rank",
        "warning",
        "All ranks hold the same parameters. Where all write them into one file at once, it may end up damaged.",
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
        "torch.load puts tensors where they were saved: all ranks of a node load onto GPU 0, whose memory may not do.",
        'state = torch.load("model.pt")',
        'state = torch.load("model.pt", map_location="cpu")',
        checkpoints.load_without_map_location,
    ),
    Rule(
        "master-overwritten",
        "error",
        "The job sets MASTER_ADDR and MASTER_PORT to where rank 0 is. A node with another address waits for itself; "
        "under torchrun another port is one where nobody listens.",
        'os.environ["MASTER_ADDR"] = "localhost"',
        'os.environ.setdefault("MASTER_ADDR", "localhost")',
        groups.master_overwritten,
    ),
    Rule(
        "master-port-fixed",
        "warning",
        "Two jobs on one machine with the same port: the second fails, or joins the group of the first.",
        'os.environ["MASTER_PORT"] = "29500"',
        'os.environ.setdefault("MASTER_PORT", "29500")',
        groups.master_port_fixed,
    ),
    Rule(
        "tcp-under-torchrun",
        "error",
        "torchrun tells its processes that its agent serves the store, so with tcp:// none of them opens one: they "
        "wait until the time-out (torch 2.13).",
        'dist.init_process_group("gloo", init_method="tcp://node-0:23456", rank=rank, world_size=world_size)',
        'dist.init_process_group("gloo")',
        groups.tcp_under_torchrun,
    ),
    Rule(
        "file-not-shared",
        "error",
        "With file:// the ranks meet in a file: nodes that share no folder each wait in their own.",
        'dist.init_process_group("gloo", init_method="file:///tmp/meet", rank=rank, world_size=world_size)',
        'dist.init_process_group("gloo")',
        groups.file_not_shared,
    ),
    Rule(
        "backend-mpi",
        "error",
        "The backend mpi needs a PyTorch that was built with MPI, and no published wheel is.",
        'dist.init_process_group("mpi")',
        'dist.init_process_group("gloo")',
        groups.backend_mpi,
    ),
    Rule(
        "nccl-without-gpu",
        "error",
        "nccl only moves data between GPUs: in a job whose pods have none the group does not form.",
        'dist.init_process_group("nccl")',
        'dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
        groups.nccl_without_gpu,
    ),
    Rule(
        "barrier-without-timeout",
        "warning",
        "A barrier on gloo waits for a missing rank for 30 minutes, and does not say which it was: where one rank "
        "prepares the data meanwhile, that may be too short.",
        'dist.init_process_group("gloo")\nif rank == 0:\n    preprocess(data)\ndist.barrier()',
        'dist.init_process_group("gloo", timeout=timedelta(hours=6))\n'
        "if rank == 0:\n    preprocess(data)\ndist.barrier()",
        groups.barrier_without_timeout,
    ),
    Rule(
        "monitored-barrier-on-nccl",
        "error",
        "monitored_barrier needs send and recv on the CPU: it is there for gloo only, and raises under nccl.",
        'dist.init_process_group("nccl")\ndist.monitored_barrier()',
        'dist.init_process_group("nccl")\ncpu = dist.new_group(backend="gloo")\ndist.monitored_barrier(cpu)',
        groups.monitored_barrier_on_nccl,
    ),
    Rule(
        "destroy-missing",
        "warning",
        "A script that has a function to destroy the group, and never calls it, ends with the group open: nccl warns "
        "at each exit. No function for it is no mistake.",
        "def cleanup():\n    dist.destroy_process_group()\n\ntrain()",
        "try:\n    train()\nfinally:\n    cleanup()",
        groups.destroy_missing,
    ),
    Rule(
        "isend-without-wait",
        "warning",
        "isend and irecv only begin: until wait() returns the tensor must be left alone, and a rank that ends before "
        "takes its message with it.",
        "dist.isend(tensor, dst=1)",
        "work = dist.isend(tensor, dst=1)\nwork.wait()",
        groups.isend_without_wait,
    ),
    Rule(
        "spawn-without-main-guard",
        "error",
        "A spawned process imports the script anew. Without the guard it spawns again, and Python stops it with a "
        "RuntimeError.",
        "mp.spawn(train, nprocs=4)",
        'if __name__ == "__main__":\n    mp.spawn(train, nprocs=4)',
        starting.spawn_without_main_guard,
    ),
    Rule(
        "spawn-of-itself",
        "error",
        "A function that spawns itself never comes to training: each of its processes starts more, "
        "until the node is full.",
        "def main(rank=0):\n    mp.spawn(main, nprocs=4)",
        "def main():\n    mp.spawn(train, nprocs=4)",
        starting.spawn_of_itself,
    ),
    Rule(
        "spawn-function-without-rank",
        "error",
        "mp.spawn gives the number of the process as the first argument, before args: a function without a parameter "
        "for it is a TypeError in every process.",
        "def train(): …\nmp.spawn(train, nprocs=4)",
        "def train(rank): …\nmp.spawn(train, nprocs=4)",
        starting.spawn_function_without_rank,
    ),
    Rule(
        "argument-value-for-name",
        "error",
        "What follows the name in add_argument is another name of the same option: a number or a type there is an "
        "error, before anything is trained.",
        'parser.add_argument("--local-rank", int(os.environ["LOCAL_RANK"]))',
        'parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))',
        starting.argument_value_for_name,
    ),
    Rule(
        "local-rank-one-spelling",
        "warning",
        "torch.distributed.launch passes --local-rank since torch 2.0 and passed --local_rank before: a script with "
        "only the old one, or with neither, ends with “unrecognized arguments” (exit code 2). The new one alone is "
        "right for all versions that DDPJob knows. torchrun passes none: there it must not be required.",
        'parser.add_argument("--local_rank", type=int)',
        'parser.add_argument("--local-rank", "--local_rank", type=int)',
        starting.local_rank_one_spelling,
    ),
    Rule(
        "launch-deprecated",
        "warning",
        "torch.distributed.launch says at each start that it will be removed; torchrun takes the same options.",
        "command: [python, -m, torch.distributed.launch, train.py]",
        'command: [torchrun, train.py]        # train.py reads os.environ["LOCAL_RANK"]',
        starting.launch_deprecated,
    ),
)
