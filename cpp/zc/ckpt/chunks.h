// How a checkpoint file is cut: into chunks of equal size, the last one shorter, each with a hash. The hashes are kept
// beside the file (in the manifest), never in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "zc/base/error.h"
#include "zc/io/file.h"

namespace zc::ckpt {

inline constexpr const char* kArea = "ckpt";

// A hash of bytes. Given from outside, so that the core links no hash library. Called from several threads at once.
using HashFn = std::uint64_t (*)(const void* data, std::size_t bytes);

// As many threads as keep a fast disk busy while some of them hash, copy or wait for a core: each has one chunk at a
// time.
inline constexpr int kDefaultThreads = 16;

struct Options {
  HashFn hash = nullptr;
  std::int64_t chunk_bytes = std::int64_t{4} << 20;  // a multiple of io::kPageBytes, at most kMaxChunkBytes
  int num_threads = kDefaultThreads;                 // each has a buffer of one chunk
};

inline constexpr std::int64_t kMaxChunkBytes = std::int64_t{64} << 20;

// Throws `kind`, in a text about `path`, when the options are not what they must be.
inline void check(const Options& options, ErrorKind kind, const std::string& path) {
  ZC_CHECK(options.hash != nullptr && options.num_threads >= 1, kInternal, "[ckpt] no hash function, or ",
           options.num_threads, " threads");
  if (options.chunk_bytes < io::kPageBytes || options.chunk_bytes > kMaxChunkBytes ||
      options.chunk_bytes % io::kPageBytes != 0) {
    fail(kind, "[ckpt] chunk size of ", path, ": got ", options.chunk_bytes, " bytes, expected a multiple of ",
         io::kPageBytes, " from ", io::kPageBytes, " to ", kMaxChunkBytes, ".");
  }
}

inline std::int64_t num_chunks(std::int64_t file_bytes, std::int64_t chunk_bytes) {
  return file_bytes / chunk_bytes + (file_bytes % chunk_bytes != 0);
}

inline std::int64_t bytes_of_chunk(std::int64_t chunk, std::int64_t file_bytes, std::int64_t chunk_bytes) {
  return std::min(chunk_bytes, file_bytes - chunk * chunk_bytes);
}

// What each worker's buffer holds: a chunk, or the whole of a smaller file.
inline std::int64_t buffer_bytes(std::int64_t file_bytes, std::int64_t chunk_bytes) {
  return std::min(chunk_bytes, io::round_up_to_page(file_bytes));
}

}  // namespace zc::ckpt
