"""One run: who is in it, what it leaves on disk, and the loop that carries out decisions."""
