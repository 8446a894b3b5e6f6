#include "zc/ckpt/reader.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <limits>
#include <string>
#include <vector>

#include "ckpt/hash.h"
#include "support/errors.h"
#include "support/temporary_folder.h"
#include "zc/ckpt/writer.h"

namespace zc::ckpt {
namespace {

using test::error_of;
using test::expect_contains;
using test::kChunk;
using test::kOptions;

class ReaderTest : public testing::Test {
 protected:
  static constexpr std::int64_t kBytes = 5 * kChunk + 100;

  ReaderTest() : data(test::sample(kBytes)), path(folder / "file") {
    const std::vector<Segment> segments{{reinterpret_cast<const std::byte*>(data.data()), kBytes}};
    hashes = write_file(path, segments, kOptions);
  }

  // The text of a kCheckpoint error that reading one range throws.
  Error error_of_range(std::int64_t offset, std::int64_t bytes) {
    std::byte byte;
    const std::vector<Range> ranges{{offset, bytes, &byte}};
    Error error = error_of([&] { read_ranges(path, kBytes, hashes, ranges, kOptions); });
    EXPECT_EQ(error.kind(), ErrorKind::kCheckpoint) << error.what();
    return error;
  }
  Error error_of_verify(const std::string& file, std::int64_t bytes, Options options = kOptions) {
    Error error = error_of([&] { verify_file(file, bytes, hashes, options); });
    EXPECT_EQ(error.kind(), ErrorKind::kCheckpoint) << error.what();
    expect_contains(error, "[ckpt] ");
    expect_contains(error, file);
    return error;
  }

  test::TemporaryFolder folder;
  std::string data, path;
  std::vector<std::uint64_t> hashes;
};

TEST_F(ReaderTest, ReadsAnyRangesAndEachChunkOnce) {
  struct Case {
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    int num_chunks;
  };
  const Case cases[] = {
      {{{0, kBytes}}, 6},
      {{{kChunk - 1, 2}}, 2},
      {{{kBytes - 1, 1}, {0, 1}}, 2},
      {{{3, 10}, {100, 20}, {5, 10}, {3, 10}}, 1},
      {{{2 * kChunk, kChunk}}, 1},
      {{{kChunk + 1, kChunk}, {kChunk, 3 * kChunk}}, 3},
      {{{kBytes, 0}, {7, 0}}, 0},
      {{}, 0},
  };
  for (const Case& test_case : cases) {
    std::vector<std::string> out;
    for (const auto& [offset, bytes] : test_case.ranges) out.emplace_back(static_cast<std::size_t>(bytes), '?');
    std::vector<Range> ranges;
    for (std::size_t i = 0; i < out.size(); ++i) {
      ranges.push_back(
          {test_case.ranges[i].first, test_case.ranges[i].second, reinterpret_cast<std::byte*>(out[i].data())});
    }
    test::num_hashes = 0;
    read_ranges(path, kBytes, hashes, ranges, kOptions);
    EXPECT_EQ(test::num_hashes, test_case.num_chunks);
    for (std::size_t i = 0; i < out.size(); ++i) {
      EXPECT_TRUE(out[i] == data.substr(static_cast<std::size_t>(ranges[i].offset), out[i].size()));
    }
  }
}

TEST_F(ReaderTest, FindsAFlippedBitAnywhere) {
  verify_file(path, kBytes, hashes, kOptions);
  for (std::int64_t at : {std::int64_t{0}, kChunk - 1, kChunk, 3 * kChunk + 17, kBytes - 1}) {
    std::string damaged = data;
    damaged[static_cast<std::size_t>(at)] ^= 4;
    test::put(path, damaged);
    const Error error = error_of_verify(path, kBytes);
    const std::int64_t begin = at / kChunk * kChunk;
    expect_contains(error, "is damaged: bytes " + io::with_commas(begin) + ".." +
                               io::with_commas(std::min(begin + kChunk, kBytes)) +
                               " do not have the checksum that the manifest says: got ");
  }
}

TEST_F(ReaderTest, ADamagedChunkIsNeverDelivered) {
  data[static_cast<std::size_t>(kChunk)] ^= 1;
  test::put(path, data);
  std::string out(static_cast<std::size_t>(kChunk), '?');
  std::vector<Range> ranges{{kChunk + 1, kChunk - 1, reinterpret_cast<std::byte*>(out.data())}};
  EXPECT_EQ(error_of([&] { read_ranges(path, kBytes, hashes, ranges, kOptions); }).kind(), ErrorKind::kCheckpoint);
  EXPECT_EQ(out, std::string(static_cast<std::size_t>(kChunk), '?'));
  ranges = {{0, kChunk, reinterpret_cast<std::byte*>(out.data())}};  // the others are
  read_ranges(path, kBytes, hashes, ranges, kOptions);
  EXPECT_TRUE(out == data.substr(0, static_cast<std::size_t>(kChunk)));
}

TEST_F(ReaderTest, RefusesRangesOutsideTheFile) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  expect_contains(error_of_range(kBytes - 1, 2), "is damaged: the manifest names 2 bytes at 41059 in a file of 41060");
  error_of_range(kBytes + 1, 0);
  error_of_range(-1, 1);
  error_of_range(0, -1);
  error_of_range(kLargest, kLargest);
  error_of_range(1, kLargest);
}

TEST_F(ReaderTest, RefusesNumbersThatDoNotFitTheFile) {
  expect_contains(error_of_verify(path, kBytes + 1),
                  "got a file of 41,060 bytes, expected 41,061 as the manifest says");
  error_of_verify(path, -1);
  error_of_verify(path, std::numeric_limits<std::int64_t>::max());
  error_of_verify(path, kBytes, {&test::fnv1a, 0, 1});
  error_of_verify(path, kBytes, {&test::fnv1a, std::int64_t{1} << 60, 1});
  hashes.pop_back();
  expect_contains(error_of_verify(path, kBytes), "got 5 checksums in the manifest, expected 6");
  test::put(path, data.substr(0, kBytes - 1));
  expect_contains(error_of_verify(path, kBytes), "got a file of 41,059 bytes");
}

TEST_F(ReaderTest, RefusesWhatIsNoRegularFile) {
  ASSERT_EQ(symlink(path.c_str(), (folder / "link").c_str()), 0);
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  ASSERT_EQ(mkdir((folder / "folder").c_str(), 0700), 0);
  expect_contains(error_of_verify(folder / "none", kBytes),
                  "is missing: got nothing, expected a file of 41,060 bytes that the manifest names");
  expect_contains(error_of_verify(folder / "link", kBytes), "is missing: got a symbolic link");
  expect_contains(error_of_verify(folder / "pipe", 0), "expected a regular file");
  expect_contains(error_of_verify(folder / "folder", kBytes), "expected a regular file");
  error_of_verify(path + "/below", kBytes);
}

TEST_F(ReaderTest, AnEmptyFileHasNoChunks) {
  write_file(folder / "empty", {}, kOptions);
  verify_file(folder / "empty", 0, {}, kOptions);
}

}  // namespace
}  // namespace zc::ckpt
