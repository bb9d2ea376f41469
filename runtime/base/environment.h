/* SPDX-License-Identifier: Apache-2.0 */
/* STARPU_ variables as the user set them.  They win over the config and over
 * what izar sets itself, and the header of a run shows them. */
#pragma once

#include <stdio.h>

/* Looks at the environment; to be called before anything sets a variable. */
void iz_environment_keep(void);
/* One line per variable. */
void iz_environment_print(FILE *out);
/* A variable that is no number, where StarPU ends the process for that; or
 * NULL.
 */
const char *iz_environment_bad(void);
/* Whole number in a variable, at most 2^20, or `none` where it is not set.
 * Anything else in it counts as not set, as StarPU has it. */
int iz_environment_number(const char *name, int none);
