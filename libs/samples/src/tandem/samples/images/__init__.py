"""Images of prompts: how they are read and kept, and how many tokens they become. No torch, and PIL only to read."""
