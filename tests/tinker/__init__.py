"""Tests of the Tinker API with the real SDK, which `tox -e tinker` installs."""
