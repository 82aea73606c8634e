"""How weights cross from trainers to engines."""
