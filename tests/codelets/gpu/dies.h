/* SPDX-License-Identifier: Apache-2.0 */
/* For tests of what ends the job. */
#pragma once

/* Calls f in a child process, which must end through iz_die with a text that
 * contains `message`. */
void dies(void (*f)(void), const char *message);
