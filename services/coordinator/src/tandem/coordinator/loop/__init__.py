"""The loop around the scheduler: it takes messages and carries out actions, step by step."""
