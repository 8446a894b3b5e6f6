// A GPU as a device, and what the host relies on when it is ahead of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "cuda/machine.h"
#include "support/errors.h"
#include "zc/cuda/cuda_device.h"
#include "zc/device/transfer.h"

namespace zc::cuda {
namespace {

using device::Stream;

BufferView host_view(std::vector<std::byte>& values) {
  return {values.data(), static_cast<std::int64_t>(values.size()), DType::kU8, {}};
}

TEST(CudaDeviceTest, MemoryIsZeroedAndItsEndIsAnErrorWithFigures) {
  Machine machine({.memory_bytes = 1000});
  CudaDevice& device = machine.device(0);
  const auto stream = device.make_stream();
  Memory held = device.allocate(600);
  std::vector<std::byte> values(600, std::byte{1});
  device.copy({held.get(), 600, DType::kU8, device.id()}, host_view(values), *stream);
  device.synchronize(*stream);
  EXPECT_EQ(values, std::vector<std::byte>(600));
  const Error error = test::error_of([&] { device.allocate(500); });
  EXPECT_EQ(error.kind(), ErrorKind::kDevice);
  test::expect_contains(error, "cuda:0");
  test::expect_contains(error, "500 bytes");
  held = nullptr;
  EXPECT_NO_THROW(device.allocate(500));
  const Memory pinned = device.allocate_pinned(100);
  EXPECT_TRUE(std::all_of(pinned.get(), pinned.get() + 100, [](std::byte b) { return b == std::byte{0}; }));
}

// The framework's choice of a device for this thread is not the backend's to change.
TEST(CudaDeviceTest, TheThreadsCurrentDeviceIsPutBack) {
  Machine machine({.num_devices = 2});
  machine.simulation().set_device(0);
  CudaDevice& device = machine.device(1);
  {
    const auto stream = device.make_stream();
    const auto event = device.make_event();
    const Memory memory = device.allocate(8);
    std::vector<std::byte> values(8);
    device.copy(host_view(values), {memory.get(), 8, DType::kU8, device.id()}, *stream);
    event->record(*stream);
    event->order(*stream);
    device.synchronize(*stream);
    EXPECT_EQ(machine.simulation().live_bytes(1), 8);
    EXPECT_EQ(machine.simulation().live_bytes(0), 0);
  }
  EXPECT_EQ(machine.simulation().live_bytes(1), 0);
  EXPECT_EQ(machine.simulation().current_device(), 0);
}

TEST(CudaDeviceTest, AnEventThatWasNotRecordedIsDone) {
  Machine machine({});
  CudaDevice& device = machine.device(0);
  const auto stream = device.make_stream();
  const auto event = device.make_event();
  EXPECT_TRUE(event->done());
  event->order(*stream);
  device.synchronize(*stream);
}

TEST(CudaDeviceTest, CopiesOfOtherSizesAreErrors) {
  Machine machine({});
  CudaDevice& device = machine.device(0);
  const Memory memory = device.allocate(8);
  std::vector<std::byte> values(7);
  EXPECT_THROW(device.copy(host_view(values), {memory.get(), 8, DType::kU8, device.id()}, {}), Error);
}

// What was written last is what kernels find, though the host writes the next values before the copy is done.
TEST(CudaDeviceTest, UploadsAreNotOverwrittenOnTheirWay) {
  for (unsigned seed : {0u, 1u, 2u, 3u}) {
    Machine machine({.seed = seed});
    CudaDevice& device = machine.device(0);
    const auto stream = device.make_stream();
    device::Upload upload(device, 4);
    Array<std::int32_t> seen(machine, device, DType::kU8, 10);
    for (std::int32_t k = 0; k < 10; ++k) {
      std::memcpy(upload.host(), &k, 4);
      const std::byte* const there = upload.send(*stream);
      machine.simulation().enqueue(stream->handle,
                                   [there, to = seen.view().as<std::int32_t>() + k] { std::memcpy(to, there, 4); });
    }
    device.synchronize(*stream);
    std::vector<std::int32_t> values(10);
    std::vector<std::byte> bytes(40);
    device.copy({seen.view().data, 40, DType::kU8, device.id()}, host_view(bytes), *stream);
    device.synchronize(*stream);
    std::memcpy(values.data(), bytes.data(), 40);
    EXPECT_EQ(values, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  }
}

// Which streams wait for which: the collective for the caller's, the caller's for the collective, and nothing else.
TEST(CudaDeviceTest, ACollectiveIsOrderedByOneEventEachWay) {
  Machine machine({.num_devices = 2, .mode = Simulation::Mode::kEager, .record_calls = true});
  std::vector<std::vector<std::string>> of_rank(2);
  std::atomic<int> turn{0};
  machine.run("nccl", [&](comm::Communicator& comm, CudaDevice& device) {
    const auto stream = device.make_stream();
    Array<float> bucket(machine, device, DType::kF32, 200), shard(machine, device, DType::kF32, 100);
    comm.reduce_scatter_add(bucket, shard, "warm up", true, *stream).wait();  // staging is allocated
    comm.barrier("both have").wait();
    while (turn != comm.rank()) std::this_thread::yield();  // one rank's calls at a time
    machine.simulation().hang(true);                        // a collective that has ended needs no waiting
    const std::size_t before = machine.simulation().calls().size();
    comm.reduce_scatter_add(bucket, shard, "bucket", false, *stream).wait(*stream);
    const auto all = machine.simulation().calls();
    of_rank[static_cast<std::size_t>(comm.rank())].assign(all.begin() + static_cast<std::ptrdiff_t>(before), all.end());
    ++turn;
    comm.barrier("both have").wait();
    machine.simulation().hang(false);
    device.synchronize(*stream);
  });
  for (const auto& own : of_rank) {
    ASSERT_EQ(own.size(), 6u);
    const auto part = [&](std::size_t call, const char* word) {  // "stream 3" of "wait on stream 3 for event 2"
      const std::size_t at = own[call].find(word);
      return at == std::string::npos ? "" : own[call].substr(at, own[call].find(' ', at + std::strlen(word) + 1) - at);
    };
    const std::string caller = part(0, "stream"), comm = part(1, "stream");
    EXPECT_NE(caller, comm);
    EXPECT_EQ(own[0], "record " + part(0, "event") + " on " + caller);
    EXPECT_EQ(own[1], "wait on " + comm + " for " + part(0, "event"));
    EXPECT_EQ(own[2], "nccl on " + comm);
    EXPECT_EQ(own[3], "kernel on " + comm);
    EXPECT_EQ(own[4], "record " + part(4, "event") + " on " + comm);
    EXPECT_EQ(own[5], "wait on " + caller + " for " + part(4, "event"));
    EXPECT_NE(part(0, "event"), part(4, "event"));
  }
}

// NCCL's own sum is of the same numbers: exact ones show it.
TEST(CudaDeviceTest, TheFastReductionSums) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Machine machine({.num_devices = 3, .seed = 2});
    machine.run("nccl",
                [&](comm::Communicator& comm, CudaDevice& device) {
                  const auto stream = device.make_stream();
                  Array<std::uint16_t> half(machine, device, DType::kBF16, 300);
                  Array<float> whole(machine, device, DType::kF32, 300), shard(machine, device, DType::kF32, 100);
                  half.set(*stream, static_cast<std::uint16_t>(comm.rank() == 0 ? 0x3f80 : 0x4000));  // 1 or 2
                  whole.set(*stream, comm.rank() == 0 ? 1.0f : 2.0f);
                  const BufferView bucket = dtype == DType::kF32 ? whole.view() : half.view();
                  for (int k = 0; k < 3; ++k) {
                    comm.reduce_scatter_add(bucket, shard, "fast", k == 0, *stream).wait(*stream);
                  }
                  EXPECT_EQ(shard.get(*stream), std::vector<float>(100, 15.0f));
                  EXPECT_EQ(comm.staging_bytes(), 100 * size_bytes(dtype));
                  device.synchronize(*stream);
                },
                std::chrono::seconds(20), {.fast = true});
  }
}

}  // namespace
}  // namespace zc::cuda
