// A hash for tests, which counts its calls, and bytes that differ from page to page.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "zc/ckpt/chunks.h"

namespace zc::test {

inline std::atomic<int> num_hashes{0};

inline std::uint64_t fnv1a(const void* data, std::size_t bytes) {
  ++num_hashes;
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i < bytes; ++i) {
    hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
  }
  return hash;
}

inline constexpr std::int64_t kChunk = 8192;
inline constexpr ckpt::Options kOptions{&fnv1a, kChunk, 3};

inline std::string sample(std::int64_t bytes) {
  std::string data(static_cast<std::size_t>(bytes), '\0');
  std::uint32_t state = 1;
  for (char& c : data) {
    state = state * 1664525u + 1013904223u;
    c = static_cast<char>(state >> 24);
  }
  return data;
}

}  // namespace zc::test
