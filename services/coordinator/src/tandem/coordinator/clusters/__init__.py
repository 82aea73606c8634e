"""Commands that run a configuration on a cluster: Slurm, Kubernetes, Ray."""
