"""Stand-ins for CUDA, which let Megatron-Core train on a CPU; no process with a GPU imports them"""
