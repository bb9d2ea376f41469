# SPDX-License-Identifier: Apache-2.0
import pytest

from place import Place


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)
