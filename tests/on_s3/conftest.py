"""Tests of S3 have whole runs, which commands start."""

from __future__ import annotations

from tests.harness.runs.console_server import console_server as console_server
