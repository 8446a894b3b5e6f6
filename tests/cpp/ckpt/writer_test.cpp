#include "zc/ckpt/writer.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "ckpt/hash.h"
#include "support/errors.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"

namespace zc::ckpt {
namespace {

using test::kChunk;
using test::kOptions;

std::vector<Segment> cut(const std::string& data, std::initializer_list<std::int64_t> at) {
  std::vector<Segment> segments;
  std::int64_t begin = 0;
  for (std::int64_t end : at) {
    segments.push_back({reinterpret_cast<const std::byte*>(data.data()) + begin, end - begin});
    begin = end;
  }
  return segments;
}

TEST(WriterTest, WritesTheConcatenationAndReturnsTheHashOfEachChunk) {
  const test::TemporaryFolder folder;
  for (std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{4095}, std::int64_t{4096},
                             std::int64_t{4097}, kChunk - 1, kChunk, kChunk + 1, 7 * kChunk, 7 * kChunk + 4099}) {
    const std::string data = test::sample(bytes), path = folder / std::to_string(bytes);
    const auto segments = cut(data, {bytes / 7, bytes / 7, bytes / 2, bytes});
    const std::vector<std::uint64_t> hashes = write_file(path, segments, kOptions);
    EXPECT_TRUE(test::contents(path) == data) << bytes;
    ASSERT_EQ(static_cast<std::int64_t>(hashes.size()), num_chunks(bytes, kChunk));
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      const std::string chunk = data.substr(i * static_cast<std::size_t>(kChunk), static_cast<std::size_t>(kChunk));
      EXPECT_EQ(hashes[i], test::fnv1a(chunk.data(), chunk.size()));
    }
  }
}

TEST(WriterTest, LeavesWhatIsThereAlone) {
  const test::TemporaryFolder folder;
  test::put(folder / "file", "old");
  const std::string data = test::sample(100);
  const Error error = test::error_of([&] { write_file(folder / "file", cut(data, {100}), kOptions); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_EQ(error.errno_value(), EEXIST);
  EXPECT_EQ(test::contents(folder / "file"), "old");
}

TEST(WriterTest, LeavesNothingBehindWhenItFails) {
  const test::TemporaryFolder folder;
  const std::string data = test::sample(5 * kChunk), path = folder / "file";
  const test::FileSizeLimit limit(3 * kChunk);
  const Error error = test::error_of([&] { write_file(path, cut(data, {5 * kChunk}), kOptions); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_EQ(error.errno_value(), EFBIG);
  EXPECT_EQ(error.path(), path);
  test::expect_contains(error, "of 40,960 bytes");
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(WriterTest, RefusesChunksThatAreNoWholePages) {
  const test::TemporaryFolder folder;
  for (std::int64_t chunk_bytes : {std::int64_t{0}, std::int64_t{-4096}, std::int64_t{100}, kMaxChunkBytes + 4096}) {
    const Options options{&test::fnv1a, chunk_bytes, 1};
    EXPECT_EQ(test::error_of([&] { write_file(folder / "file", {}, options); }).kind(), ErrorKind::kInternal);
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "file"));
}

}  // namespace
}  // namespace zc::ckpt
