# SPDX-License-Identifier: Apache-2.0
"""Puts the tool's modules where the tests find them."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tools"))
