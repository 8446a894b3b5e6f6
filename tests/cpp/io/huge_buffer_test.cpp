#include "zc/io/huge_buffer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

namespace zc::io {
namespace {

TEST(HugeBufferTest, IsZeroedAlignedAndMapped) {
  for (std::int64_t bytes :
       {std::int64_t{1}, std::int64_t{4097}, std::int64_t{2} << 20, (std::int64_t{70} << 20) + 1}) {
    const HugeBuffer buffer(bytes);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % (bytes < 2 << 20 ? 4096 : 2 << 20), 0u);
    std::vector<unsigned char> present(static_cast<std::size_t>((bytes + 4095) / 4096));
    ASSERT_EQ(mincore(buffer.data(), static_cast<std::size_t>(bytes), present.data()), 0);
    EXPECT_TRUE(std::all_of(present.begin(), present.end(), [](unsigned char page) { return (page & 1) != 0; }));
    EXPECT_TRUE(std::all_of(buffer.data(), buffer.data() + bytes, [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(HugeBufferTest, MayBeEmptyAndMoves) {
  EXPECT_EQ(HugeBuffer().data(), nullptr);
  EXPECT_EQ(HugeBuffer(0).bytes(), 0);
  HugeBuffer first(5000);
  std::byte* data = first.data();
  const HugeBuffer second = std::move(first);
  EXPECT_EQ(second.data(), data);
}

}  // namespace
}  // namespace zc::io
