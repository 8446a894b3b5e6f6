#include "zc/ckpt/segments.h"

#include <algorithm>
#include <cstring>

#include "zc/base/error.h"
#include "zc/io/workers.h"

namespace zc::ckpt {

Concatenation::Concatenation(std::span<const Segment> segments) : segments_(segments), begins_{0} {
  begins_.reserve(segments.size() + 1);
  for (const Segment& segment : segments) {
    ZC_CHECK(segment.bytes >= 0, kInternal, "[ckpt] segment of ", segment.bytes, " bytes");
    begins_.push_back(begins_.back() + segment.bytes);
  }
}

void Concatenation::copy(std::int64_t begin, std::int64_t bytes, std::byte* to) const {
  const std::int64_t end = begin + bytes;
  ZC_CHECK(begin >= 0 && bytes >= 0 && end <= this->bytes(), kInternal, "[ckpt] copy of [", begin, ", ", end, ") of ",
           this->bytes(), " bytes");
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), begin);
  for (auto i = static_cast<std::size_t>(after - begins_.begin()) - 1; begin < end; ++i) {
    const std::int64_t stop = std::min(end, begins_[i + 1]);
    if (stop > begin) {
      std::memcpy(to, segments_[i].data + (begin - begins_[i]), static_cast<std::size_t>(stop - begin));
    }
    to += stop - begin;
    begin = stop;
  }
}

void copy_segments(std::span<const Segment> segments, std::byte* to, int num_threads) {
  constexpr std::int64_t kPiece = std::int64_t{64} << 20;  // large enough for memcpy to go past the caches
  const Concatenation source(segments);
  io::run_workers((source.bytes() + kPiece - 1) / kPiece, num_threads == 0 ? io::num_copy_workers() : num_threads,
                  [&](int, std::int64_t piece) {
                    const std::int64_t begin = piece * kPiece;
                    source.copy(begin, std::min(kPiece, source.bytes() - begin), to + begin);
                  });
}

}  // namespace zc::ckpt
