"""The assistant's turns: where they are in a rendered conversation, and what ends them."""
