"""The page: a read-only web server over run folders, in a process of its own."""
