/* SPDX-License-Identifier: Apache-2.0 */
/* The main function of every model's program. */
#include "runtime/run/run.h"

/* Defined by the model that this program is linked with. */
extern const struct iz_program iz_program;

int main(int argc, char **argv)
{
    return iz_run(argc, argv, &iz_program);
}
