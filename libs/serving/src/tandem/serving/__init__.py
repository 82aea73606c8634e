"""The APIs of OpenAI and Tinker and what answers them: models to use during a run and after it."""
