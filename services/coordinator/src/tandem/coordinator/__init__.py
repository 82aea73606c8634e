"""The coordinator: the algorithm loop, data order, advantages, the journal and the command line. No torch here."""
