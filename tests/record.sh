#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs one test of meson and leaves in $IZ_TEST_RESULTS what tests/tally.py
# counts: the command, its exit status, how long it took, and the cases that
# cmocka or pytest saw.  A test that crashes or is killed leaves no status.
set -u

dir=$(mktemp -d "$IZ_TEST_RESULTS/XXXXXX")
printf '%s\n' "$*" >"$dir/command"
export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} --junitxml=$dir/pytest.xml"
case "$*" in # Open MPI leaks, from plugins that are gone at the end
*mpirun* | *pytest*) export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" ;;
esac
case "$*" in
*mpirun*) ;; # several ranks would write one file
*) export CMOCKA_MESSAGE_OUTPUT=xml CMOCKA_XML_FILE="$dir/%g.xml" ;;
esac

status=0
"$@" || status=$?
echo "$SECONDS" >"$dir/seconds"
echo "$status" >"$dir/status"
exit "$status"
