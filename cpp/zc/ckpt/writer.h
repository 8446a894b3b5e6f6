// Writes the files of a checkpoint.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zc/ckpt/chunks.h"
#include "zc/ckpt/segments.h"

namespace zc::ckpt {

// Writes the concatenation of `segments` into a new file and returns the hashes of its chunks. On return the bytes are
// on the disk; the file's entry in its folder is not (sync_folder). Each thread copies a chunk into its own buffer,
// hashes what it copied and writes it past the page cache, so memory is num_threads chunks whatever the size. Throws
// kIo (the path exists, a full disk, ...), with the path removed again unless it was there before. Blocks; may be
// called from any thread.
std::vector<std::uint64_t> write_file(const std::string& path, std::span<const Segment> segments,
                                      const Options& options);

}  // namespace zc::ckpt
