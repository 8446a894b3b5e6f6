// Reads the files of a checkpoint, and believes nothing that it has not checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "zc/ckpt/chunks.h"

namespace zc::ckpt {

// `bytes` bytes from `offset` on in the file go to `to`, which the caller owns.
struct Range {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  std::byte* to = nullptr;
};

// Reads the ranges, in any order; they may overlap in the file. Only the chunks that they touch are read, each once and
// past the page cache, and nothing of a chunk reaches its destination before its hash was found right. Memory is
// num_threads chunks, whatever the numbers say.
//
// `file_bytes`, `hashes` and the chunk size are what the manifest says of the file. Throws kCheckpoint when the file is
// missing or no regular file, when its size, the number of hashes, a hash or a range does not fit, and kIo when the
// system cannot read it. Blocks; may be called from any thread.
void read_ranges(const std::string& path, std::int64_t file_bytes, std::span<const std::uint64_t> hashes,
                 std::span<const Range> ranges, const Options& options);

// Reads all of the file and keeps nothing; throws as read_ranges does.
void verify_file(const std::string& path, std::int64_t file_bytes, std::span<const std::uint64_t> hashes,
                 const Options& options);

}  // namespace zc::ckpt
