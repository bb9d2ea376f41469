# SPDX-License-Identifier: Apache-2.0
codec_is_available <- function(...) TRUE
write_parquet <- write_feather <- function(x, sink, ...) {
  saveRDS(x, sink)
  invisible(x)
}
read_parquet <- read_feather <- open_dataset <- function(file, ...) readRDS(file)
