#!/usr/bin/env bash
# Install Slurm from Debian's packages, where that is possible; tests of it are skipped, and say so, where it is not there.
set -euo pipefail
if command -v slurmctld > /dev/null && command -v munged > /dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "Slurm is not installed, and cannot be without root and apt-get"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get update -qq && timeout 300 apt-get install -qq -y --no-install-recommends slurm-wlm munge; } \
  > /dev/null 2>&1 || echo "Slurm could not be installed"
