#include "zc/ckpt/commit.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "support/errors.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"
#include "zc/base/error.h"

namespace zc::ckpt {
namespace {

using test::contents;
using test::error_of;
using test::put;

std::string make_folder(const std::string& path, std::string_view data) {
  std::filesystem::create_directory(path);
  put(path + "/file", data);
  return path;
}

TEST(CommitTest, ReplacesAFile) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "latest";
  replace_file(path, "first");
  EXPECT_EQ(contents(path), "first");
  put(path + ".new", "left by a process that was killed, and longer");
  replace_file(path, "second");
  EXPECT_EQ(contents(path), "second");
  replace_file(path, "");
  EXPECT_EQ(contents(path), "");
  EXPECT_FALSE(std::filesystem::exists(path + ".new"));
}

TEST(CommitTest, AFailedReplacementKeepsTheOldFile) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "latest";
  replace_file(path, "old");
  const test::FileSizeLimit limit(2);
  const Error error = error_of([&] { replace_file(path, "new"); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_EQ(error.errno_value(), EFBIG);
  EXPECT_EQ(contents(path), "old");
  EXPECT_FALSE(std::filesystem::exists(path + ".new"));
}

TEST(CommitTest, WritesANewFileOnlyWhereThereIsNone) {
  const test::TemporaryFolder folder;
  write_new_file(folder / "file", "data");
  EXPECT_EQ(contents(folder / "file"), "data");
  EXPECT_EQ(error_of([&] { write_new_file(folder / "file", "other"); }).errno_value(), EEXIST);
  EXPECT_EQ(contents(folder / "file"), "data");
}

TEST(CommitTest, NamesAFolder) {
  const test::TemporaryFolder folder;
  const std::string from = make_folder(folder / "from", "new");
  EXPECT_EQ(commit_folder(from, folder / "to"), "");
  EXPECT_EQ(contents(folder / "to/file"), "new");
  EXPECT_FALSE(std::filesystem::exists(from));
}

TEST(CommitTest, ExchangesWithAnOlderFolder) {
  const test::TemporaryFolder folder;
  const std::string from = make_folder(folder / "from", "new"), to = make_folder(folder / "to", "old");
  const std::string old = commit_folder(from, to);
  EXPECT_EQ(contents(to + "/file"), "new");
  EXPECT_EQ(contents(old + "/file"), "old");
}

TEST(CommitTest, ReplacesNothingButAFolder) {
  const test::TemporaryFolder folder;
  const std::string from = make_folder(folder / "from", "new");
  put(folder / "to", "a file");
  const Error error = error_of([&] { commit_folder(from, folder / "to"); });
  EXPECT_EQ(error.kind(), ErrorKind::kIo);
  EXPECT_EQ(error.errno_value(), ENOTDIR);
  EXPECT_EQ(error.path(), folder / "to");
  EXPECT_EQ(contents(folder / "to"), "a file");
  EXPECT_EQ(error_of([&] { commit_folder(folder / "none", folder / "to"); }).errno_value(), ENOENT);
  EXPECT_EQ(error_of([&] { commit_folder(from, folder / "elsewhere/to"); }).kind(), ErrorKind::kInternal);
}

TEST(CommitTest, FindsTheParentOfAnyPath) {
  const test::TemporaryFolder folder;
  const std::filesystem::path here = std::filesystem::current_path();
  std::filesystem::current_path(folder / ".");
  make_folder("from", "new");
  commit_folder("from/", "to");
  EXPECT_EQ(contents(folder / "to/file"), "new");
  replace_file("latest", "to");
  EXPECT_EQ(contents(folder / "latest"), "to");
  std::filesystem::current_path(here);
}

}  // namespace
}  // namespace zc::ckpt
