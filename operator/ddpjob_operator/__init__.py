"""DDPJob: PyTorch DistributedDataParallel jobs on Kubernetes, and the same jobs as local processes."""
