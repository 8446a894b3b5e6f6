// What the public part of every communicator checks.
#include "zc/comm/communicator.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>

#include "zc/comm/self_communicator.h"

namespace zc::comm {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(CommunicatorTest, ArgumentsAreChecked) {
  const auto comm = make_self_communicator();
  std::array<float, 8> data{};
  const BufferView eight{data.data(), 8, DType::kF32, {}};
  const BufferView four = eight.slice(0, 4);
  const BufferView bytes{data.data(), 8, DType::kU8, {}};
  const BufferView cuda{data.data(), 8, DType::kF32, {DeviceType::kCuda, 0}};
  std::array<std::byte, 4> out;

  EXPECT_EQ(message_of([&] { comm->reduce_scatter_add(eight, four, ""); }),
            "[comm] reduce_scatter_add: bucket length: got 8 elements, expected 4 (1 ranks times a shard of 4)");
  EXPECT_EQ(message_of([&] { comm->reduce_scatter_add(bytes, eight, ""); }),
            "[comm] reduce_scatter_add: bucket dtype: got uint8, expected fp32, fp16 or bf16");
  EXPECT_EQ(message_of([&] { comm->reduce_scatter_add(eight, bytes, ""); }),
            "[comm] reduce_scatter_add: shard dtype: got uint8, expected fp32, fp16 or bf16");
  EXPECT_EQ(message_of([&] { comm->broadcast(eight, 1, ""); }),
            "[comm] broadcast: root: got rank 1, expected 0 to 0. Name a rank of this communicator.");
  EXPECT_EQ(message_of([&] { comm->gather_bytes({}, out, ""); }),
            "[comm] gather_bytes: room for the result: got 4 bytes, expected 0 (1 ranks times 0)");
  EXPECT_EQ(message_of([&] { comm->all_gather(cuda, ""); }),
            "[comm] all_gather: buffer lies in cuda:0, which the \"self\" communicator does not take.");
  EXPECT_EQ(message_of([&] { comm->all_gather(four, bytes, ""); }),
            "[comm] all_gather: shard dtype: got fp32, expected the buffer's, uint8");
  EXPECT_EQ(message_of([&] { comm->all_gather(four, eight, ""); }),
            "[comm] all_gather: buffer length: got 8 elements, expected 4 (1 ranks times a shard of 4)");
  EXPECT_NE(message_of([&] {
              comm->all_gather(eight.slice(1, 4), four, "");
            }).find("[comm] all_gather: the shard overlaps the buffer: got 4 elements at "),
            std::string::npos);
  EXPECT_EQ(message_of([&] { comm->all_gather(eight.slice(4, 4), four, ""); }), "no error");
  EXPECT_EQ(message_of([&] { comm->set_timeout(std::chrono::milliseconds(0)); }),
            "[comm] timeout_ms is not positive: got 0, expected at least 1. Give the time a rank may wait for its "
            "peers, in milliseconds.");
}

TEST(CommunicatorTest, AWorkWithoutACollectiveIsComplete) {
  const Work work;
  EXPECT_TRUE(work.done());
  EXPECT_TRUE(work.wait_for(std::chrono::milliseconds(0)));
  work.wait();
}

TEST(CommunicatorTest, WorkKeepsMemoryUntilItIsDone) {
  auto state = std::make_shared<Work::State>();
  const Work work(state);
  auto memory = std::make_shared<int>(7);
  const std::weak_ptr<int> watch = memory;
  work.keep(std::move(memory));
  EXPECT_FALSE(work.wait_for(std::chrono::milliseconds(1)));
  EXPECT_FALSE(watch.expired());
  state->complete(Error(ErrorKind::kComm, "broken"));
  EXPECT_TRUE(watch.expired());
  EXPECT_THROW(work.wait(), Error);
  EXPECT_THROW(work.wait_for(std::chrono::milliseconds(1)), Error);
}

}  // namespace
}  // namespace zc::comm
