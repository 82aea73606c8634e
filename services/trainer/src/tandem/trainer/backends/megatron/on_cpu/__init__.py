"""Stand-ins for CUDA, which let Megatron-Core train on a CPU; a process with a GPU imports none of them"""
