"""Real families of models: their chat templates and tokenizers, beside the packages that users compare with."""
