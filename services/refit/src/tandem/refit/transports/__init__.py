"""How bytes move from one process to another: one module a transport, both ends in it, named in `registry`."""
