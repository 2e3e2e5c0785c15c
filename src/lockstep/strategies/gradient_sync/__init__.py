"""Ways to average gradients under DistributedDataParallel."""
