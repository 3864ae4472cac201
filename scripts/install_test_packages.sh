#!/bin/sh
# Debian packages that some tests use where they are there; without them those tests skip and say so. Needs root.
#   redis-server: the store's contract tests run on it, too (tests/contract/conftest.py)
set -eu
export DEBIAN_FRONTEND=noninteractive
# At runlevel 1 no package starts a service: the tests start their own servers, on loopback and on their own ports.
apt-get update --quiet
RUNLEVEL=1 apt-get install --yes --quiet --no-install-recommends redis-server
