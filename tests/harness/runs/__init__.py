"""Starting real runs, and reading what they leave."""
