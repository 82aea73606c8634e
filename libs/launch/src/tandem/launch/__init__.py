"""Start the processes of a run, on this host and on a cluster, and keep them running"""
