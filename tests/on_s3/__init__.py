"""Tests of weights through S3, with the server of moto."""
