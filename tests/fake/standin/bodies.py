# SPDX-License-Identifier: Apache-2.0
"""Prints a body for every op that a header declares: iz_NAME_cuda(x, ...) is
call(iz_NAME, x, ...), which ops.cc has."""
import re
import sys

with open(sys.argv[1]) as header:
    ops = re.findall(r"^void (iz_\w+)_cuda\(([^;]*)\);", header.read(), re.M)
for name, parameters in ops:
    words = [re.findall(r"\w+", p)[-1] for p in parameters.split(",")]
    print(f"void {name}_cuda({parameters})\n{{\n"
          f"    call({', '.join([name] + words)});\n}}\n")
