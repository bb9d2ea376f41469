/* SPDX-License-Identifier: Apache-2.0 */
/* What a run keeps of the folder it imported: config.json, and the files that
 * mean nothing here but that a reader of an export needs beside it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* The names: the config, what generates, what a tokenizer is made of. */
#define IZ_IMPORTED_FILES                                                      \
    "config.json", "generation_config.json", "chat_template.jinja",            \
        "chat_template.json", "tokenizer_config.json",                         \
        "special_tokens_map.json", "added_tokens.json", "merges.txt",          \
        "vocab.json", "tekken.json", "tokenizer.model", "tokenizer.json"
/* And a folder of such files. */
#define IZ_IMPORTED_TEMPLATES "additional_chat_templates"
#define IZ_IMPORTED_TEMPLATE "*.jinja"
/* What "auto_map" in a config names. */
#define IZ_IMPORTED_CODE "*.py"
#define IZ_IMPORTED_ALL                                                        \
    IZ_IMPORTED_FILES, IZ_IMPORTED_TEMPLATES, IZ_IMPORTED_TEMPLATE,            \
        IZ_IMPORTED_CODE

/* Copies the folder's files into the run's output.  An export takes them from
 * there, so the folder may be gone by then.  A resumed run keeps existing
 * copies; a new run without an import (folder "") removes them.  On one rank;
 * negative errno with the reason printed. */
int iz_imported_keep(const char *output, const char *folder, bool goes_on);

/* The folder that an export takes them from: the run's own or, of a run that
 * kept nothing, the one it imported (NULL or "": none, path is "").  On one
 * rank; negative errno with the reason printed. */
int iz_imported_find(char *path, size_t size, const char *output,
                     const char *folder);

/* Copies what `from` (NULL or "": nothing) has of the files but for
 * config.json. */
int iz_imported_copy(const char *who, const char *to, const char *from);

/* Prints a line if an export in `folder` has no tokenizer. */
void iz_imported_tell(const char *folder);
