/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a test that run in a process of their own, because they must crash
 * or need an environment of their own: the test program starts itself with the
 * name of the part. */
#pragma once

struct child_body {
    const char *name;
    void (*run)(void);
};

/* What a child wrote on standard error, and its status of waitpid. */
struct child {
    char text[8192];
    int status;
};

/* Starts this program with one argument and waits for its end. */
void child_run(struct child *c, const char *name);

/* Runs the body of that name, of a list that ends with {0}; the status to exit
 * with. */
int child_main(const struct child_body *bodies, const char *name);
