"""Looking at runs: what one will be, what one was, and the pages that are generated from the code."""
