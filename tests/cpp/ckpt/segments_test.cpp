#include "zc/ckpt/segments.h"

#include <gtest/gtest.h>

#include <string>

#include "ckpt/hash.h"
#include "support/errors.h"
#include "zc/io/huge_buffer.h"

namespace zc::ckpt {
namespace {

Segment segment(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), static_cast<std::int64_t>(text.size())};
}

TEST(SegmentsTest, AnyPartOfTheConcatenationIsCopied) {
  const std::string first = "abc", none, second = "defgh", third = "i";
  const std::vector<Segment> segments{segment(none), segment(first), segment(none), segment(second), segment(third)};
  const Concatenation all(segments);
  ASSERT_EQ(all.bytes(), 9);
  for (std::int64_t begin = 0; begin <= 9; ++begin) {
    for (std::int64_t end = begin; end <= 9; ++end) {
      std::string out(static_cast<std::size_t>(end - begin), '?');
      all.copy(begin, end - begin, reinterpret_cast<std::byte*>(out.data()));
      EXPECT_EQ(out, std::string("abcdefghi").substr(static_cast<std::size_t>(begin), out.size()));
    }
  }
  std::byte byte;
  EXPECT_EQ(test::error_of([&] { all.copy(9, 1, &byte); }).kind(), ErrorKind::kInternal);
  EXPECT_EQ(Concatenation({}).bytes(), 0);
}

TEST(SegmentsTest, CopiesLargeOnesOnSeveralThreads) {
  constexpr std::int64_t kBytes = (std::int64_t{130} << 20) + 5;  // more than two pieces
  const io::HugeBuffer from(kBytes), to(kBytes);
  for (std::int64_t i = 0; i < kBytes; i += 4093) from.data()[i] = static_cast<std::byte>(i >> 12);
  const std::vector<Segment> segments{{from.data(), 77}, {from.data() + 77, kBytes - 77}};
  for (const int num_threads : {0, 1, 3}) {
    std::fill(to.data(), to.data() + kBytes, std::byte{0xff});
    copy_segments(segments, to.data(), num_threads);
    EXPECT_TRUE(std::equal(from.data(), from.data() + kBytes, to.data()));
  }
}

}  // namespace
}  // namespace zc::ckpt
