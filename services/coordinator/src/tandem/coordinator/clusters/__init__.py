"""How a cluster starts a run: what each node launches, a script for Slurm, manifests for Kubernetes."""
