#include "zc/io/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "support/errors.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"
#include "zc/io/huge_buffer.h"

namespace zc::io {
namespace {

using test::error_of;
using test::expect_contains;

TEST(FileTest, NumbersHaveCommas) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(-999), "-999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
}

TEST(FileTest, WritesAndReadsWithAndWithoutThePageCache) {
  const test::TemporaryFolder folder;
  const HugeBuffer pages(8192);
  for (const bool direct : {false, true}) {
    const std::string path = folder / (direct ? "direct" : "cached");
    File out = File::create("test", path);
    if (direct) out.use_direct();
    out.reserve(8192);
    std::memset(pages.data(), 'a', 4096);
    std::memset(pages.data() + 4096, 'b', 4096);
    out.write(pages.data() + 4096, 4096, 4096);
    out.write(pages.data(), 4096, 0);
    out.truncate(5000);
    out.sync();
    out.close();
    EXPECT_EQ(test::contents(path), std::string(4096, 'a') + std::string(904, 'b'));

    File in = File::open("test", path);
    EXPECT_TRUE(in.is_regular());
    EXPECT_EQ(in.bytes(), 5000);
    if (direct) in.use_direct();
    const bool was_direct = in.is_direct();
    EXPECT_EQ(in.read(pages.data(), 5000, 0), 5000);
    EXPECT_EQ(std::memcmp(pages.data(), test::contents(path).data(), 5000), 0);
    EXPECT_EQ(in.read(pages.data(), 8192, 0), 5000);
    EXPECT_EQ(in.read(pages.data(), 100, 4096), 100);
    EXPECT_EQ(in.read(pages.data(), 4096, 8192), 0);
    EXPECT_EQ(in.is_direct(), was_direct);  // not lost at the end of a file that ends within a page
  }
}

TEST(FileTest, GoesOnThroughThePageCacheWhereDirectWritesAreRefused) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "file";
  File file = File::create("test", path);
  file.use_direct();
  const HugeBuffer pages(8192);
  file.write(pages.data() + 1, 100, 0);  // no file system takes this past the cache
  file.close();
  EXPECT_EQ(test::contents(path), std::string(100, '\0'));
}

TEST(FileTest, CreateKeepsWhatIsThere) {
  const test::TemporaryFolder folder;
  test::put(folder / "file", "old");
  const Error error = error_of([&] { File::create("area", folder / "file"); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_EQ(error.errno_value(), EEXIST);
  EXPECT_EQ(error.path(), folder / "file");
  EXPECT_EQ(std::string(error.what()),
            "[area] create " + (folder / "file") + ": File exists (errno 17). Remove it, or choose another name.");
  EXPECT_EQ(test::contents(folder / "file"), "old");
}

TEST(FileTest, OpensNoLinkAndDoesNotWaitForAPipe) {
  const test::TemporaryFolder folder;
  test::put(folder / "file", "x");
  ASSERT_EQ(symlink((folder / "file").c_str(), (folder / "link").c_str()), 0);
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(error_of([&] { File::open("test", folder / "link"); }).errno_value(), ELOOP);
  EXPECT_EQ(error_of([&] { File::open("test", folder / "none"); }).errno_value(), ENOENT);
  EXPECT_FALSE(File::open("test", folder / "pipe").is_regular());
  EXPECT_FALSE(File::open("test", folder / ".").is_regular());
}

TEST(FileTest, AWriteThatIsCutShortSaysHowMuchThereWas) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "file";
  const HugeBuffer pages(16384);
  File file = File::create("ckpt", path);
  const test::FileSizeLimit limit(8192);
  const Error error = error_of([&] { file.write(pages.data(), 12288, 4096); });
  EXPECT_EQ(error.errno_value(), EFBIG);
  EXPECT_EQ(error.path(), path);
  expect_contains(error, "[ckpt] write " + path + ": got 4,096 of 12,288 bytes at offset 4,096: File too large");
  expect_contains(error, "(errno 27). ");
}

TEST(FileTest, FindsAtReservationThatThereIsNoRoom) {
  const test::TemporaryFolder folder;
  File file = File::create("ckpt", folder / "file");
  const Error error = error_of([&] { file.reserve(std::int64_t{1} << 43); });  // 8 TiB
  EXPECT_TRUE(error.errno_value() == ENOSPC || error.errno_value() == EFBIG) << error.what();
  expect_contains(error, "8,796,093,022,208");
  file.reserve(0);
}

TEST(FileTest, ClosesWhatItOpened) {
  const test::TemporaryFolder folder;
  const int free_before = dup(0);
  close(free_before);
  {
    File first = File::create("test", folder / "file");
    File second = std::move(first);
    File::open("test", folder / ".").sync();
  }
  const int free_after = dup(0);
  close(free_after);
  EXPECT_EQ(free_after, free_before);
}

}  // namespace
}  // namespace zc::io
