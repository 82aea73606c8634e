"""The room of engines: how they are built, join, come back and leave, and what they are connected with."""
