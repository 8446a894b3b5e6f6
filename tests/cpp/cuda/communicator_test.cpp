// What tests/cpp/comm/conformance_test.cpp asks of collectives, of those of a device's memory: over a fake NCCL and by
// way of host memory, on streams that run as late as they may. Values are exactly representable, and the expected
// results closed-form.
#include <gtest/gtest.h>

#include <bit>
#include <numeric>

#include "cuda/machine.h"
#include "support/errors.h"

namespace zc::cuda {
namespace {

using comm::Communicator;
using comm::Op;
using comm::ReduceOp;
using comm::Work;
using device::Stream;

struct World {
  const char* backend;
  int size;
  unsigned seed;
};

std::uint16_t bf16(float value) {  // of values that bf16 holds
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

class DeviceCommunicatorTest : public testing::TestWithParam<World> {
 protected:
  struct Rank {
    Communicator& comm;
    CudaDevice& device;
    Machine& machine;
    Stream stream;
    std::size_t n;

    template <class T>
    Array<T> make(DType dtype, std::size_t numel) const {
      return {machine, device, dtype, numel};
    }
  };

  void run(const std::function<void(Rank)>& body) {
    Machine machine({.num_devices = GetParam().size, .seed = GetParam().seed});
    machine.run(GetParam().backend, [&](Communicator& comm, CudaDevice& device) {
      const auto stream = device.make_stream();
      body({comm, device, machine, *stream, static_cast<std::size_t>(comm.size())});
      device.synchronize(*stream);
    });
  }
};

TEST_P(DeviceCommunicatorTest, KnowsItsPlace) {
  run([](const Rank& rank) {
    EXPECT_STREQ(rank.comm.backend(), GetParam().backend);
    EXPECT_EQ(rank.comm.size(), GetParam().size);
    EXPECT_TRUE(rank.comm.takes({}));
    EXPECT_TRUE(rank.comm.takes(rank.device.id()));
    EXPECT_FALSE(rank.comm.takes({DeviceType::kCuda, 7}));
  });
}

TEST_P(DeviceCommunicatorTest, ReduceScatterAddSumsSlices) {
  run([](const Rank& rank) {
    const auto me = static_cast<std::size_t>(rank.comm.rank());
    for (const std::size_t numel : {0u, 1u, 1023u, 20'001u}) {
      const auto value = [me](std::size_t i) { return static_cast<float>(i % 1000 + 1000 * me); };
      auto bucket = rank.make<float>(DType::kF32, rank.n * numel);
      auto shard = rank.make<float>(DType::kF32, numel);
      bucket.fill(rank.stream, value);
      shard.set(rank.stream, 0.5f);
      const Work work = rank.comm.reduce_scatter_add(bucket, shard, "sum", false, rank.stream);
      work.wait(rank.stream);
      const auto sum = shard.get(rank.stream);
      for (std::size_t i = 0; i < numel; ++i) {
        const auto expected =
            0.5f + static_cast<float>(rank.n * ((me * numel + i) % 1000) + 500 * rank.n * (rank.n - 1));
        ASSERT_EQ(sum[i], expected) << i;
      }
      const auto after = bucket.get(rank.stream);
      for (std::size_t i = 0; i < after.size(); ++i) ASSERT_EQ(after[i], value(i));
      work.wait();
      EXPECT_TRUE(work.done());
    }
  });
}

TEST_P(DeviceCommunicatorTest, ReduceScatterAddFoldsInRankOrder) {
  run([](const Rank& rank) {
    // In fp32 1e8 + 1 is 1e8, so only the order of ranks gives these results.
    const float terms[] = {1.0f, 1e8f, -1e8f, 3.0f};
    const float sums[] = {1.0f, 1e8f, 0.0f, 3.0f};
    auto bucket = rank.make<float>(DType::kF32, rank.n * 5);
    auto shard = rank.make<float>(DType::kF32, 5);
    bucket.set(rank.stream, terms[rank.comm.rank()]);
    shard.set(rank.stream, std::nanf(""));
    rank.comm.reduce_scatter_add(bucket, shard, "order", true, rank.stream).wait(rank.stream);
    EXPECT_EQ(shard.get(rank.stream), std::vector<float>(5, sums[rank.n - 1]));
  });
}

TEST_P(DeviceCommunicatorTest, HalfTypesAreSummedInFp32AndRoundedToTheShardsDtype) {
  run([](const Rank& rank) {
    const float scale = static_cast<float>(1 << rank.comm.rank());
    auto half = rank.make<std::uint16_t>(DType::kBF16, rank.n * 3);
    auto shard = rank.make<float>(DType::kF32, 3);
    half.set(rank.stream, bf16(rank.comm.rank() % 2 == 0 ? scale : 1.0f / 1024));
    shard.set(rank.stream, 0.0f);
    rank.comm.reduce_scatter_add(half, shard, "bf16", false, rank.stream).wait(rank.stream);
    const float sums[] = {1.0f, 1 + 1.0f / 1024, 5 + 1.0f / 1024, 5 + 2.0f / 1024};
    EXPECT_EQ(shard.get(rank.stream), std::vector<float>(3, sums[rank.n - 1]));

    auto bucket = rank.make<float>(DType::kF32, rank.n * 4000);
    auto rounded = rank.make<std::uint16_t>(DType::kBF16, 4000);
    bucket.set(rank.stream, rank.comm.rank() == 0 ? 1.0f : 0x1p-8f);  // each sum is a tie, and rounds back to 1
    rounded.set(rank.stream, 0);
    rank.comm.reduce_scatter_add(bucket, rounded, "rounded", false, rank.stream).wait(rank.stream);
    EXPECT_EQ(rounded.get(rank.stream), std::vector<std::uint16_t>(4000, bf16(1.0f)));
  });
}

TEST_P(DeviceCommunicatorTest, AllGatherFillsEverySliceFromWithinAndWithout) {
  run([](const Rank& rank) {
    const auto me = static_cast<std::size_t>(rank.comm.rank());
    for (const std::size_t slice : {0u, 1u, 333u, 50'000u}) {
      const auto value = [slice](std::size_t at) { return static_cast<std::uint16_t>(at % 977 + at / slice); };
      auto inside = rank.make<std::uint16_t>(DType::kBF16, slice * rank.n);
      auto full = rank.make<std::uint16_t>(DType::kBF16, slice * rank.n);
      auto shard = rank.make<std::uint16_t>(DType::kBF16, slice);
      inside.fill(rank.stream, [=](std::size_t at) { return at / slice == me ? value(at) : std::uint16_t{0xffff}; });
      shard.fill(rank.stream, [=](std::size_t at) { return value(me * slice + at); });
      const Work works[] = {rank.comm.all_gather(inside, "in place", rank.stream),
                            rank.comm.all_gather(shard, full, "from outside", rank.stream)};
      for (const Work& work : works) work.wait(rank.stream);
      for (const auto& values : {inside.get(rank.stream), full.get(rank.stream)}) {
        for (std::size_t at = 0; at < values.size(); ++at) ASSERT_EQ(values[at], value(at)) << at;
      }
    }
  });
}

TEST_P(DeviceCommunicatorTest, BroadcastCopiesTheRoots) {
  run([](const Rank& rank) {
    for (int root = 0; root < rank.comm.size(); ++root) {
      auto data = rank.make<std::uint8_t>(DType::kU8, 1001);
      data.set(rank.stream, static_cast<std::uint8_t>(rank.comm.rank() + 1));
      rank.comm.broadcast(data, root, "broadcast", rank.stream).wait(rank.stream);
      EXPECT_EQ(data.get(rank.stream), std::vector<std::uint8_t>(1001, static_cast<std::uint8_t>(root + 1)));
    }
  });
}

TEST_P(DeviceCommunicatorTest, AllReduceIsExactAndRefusesBits) {
  run([](const Rank& rank) {
    const auto n = static_cast<std::int64_t>(rank.n);
    const std::int64_t me = rank.comm.rank();
    const std::int64_t large = std::int64_t{1} << 60;  // a double would lose the low bits
    auto sum = rank.make<std::int64_t>(DType::kI64, 129);
    auto max = rank.make<std::int64_t>(DType::kI64, 129);
    sum.fill(rank.stream, [=](std::size_t i) { return large + static_cast<std::int64_t>(i) * (me + 1); });
    max.fill(rank.stream, [=](std::size_t i) { return (static_cast<std::int64_t>(i) + me) % n - large; });
    rank.comm.all_reduce(sum, ReduceOp::kSum, "sum", rank.stream).wait(rank.stream);
    rank.comm.all_reduce(max, ReduceOp::kMax, "max", rank.stream).wait(rank.stream);
    const auto sums = sum.get(rank.stream), maxima = max.get(rank.stream);
    for (std::int64_t i = 0; i < 129; ++i) {
      ASSERT_EQ(sums[static_cast<std::size_t>(i)], n * large + i * n * (n + 1) / 2);
      ASSERT_EQ(maxima[static_cast<std::size_t>(i)], n - 1 - large);
    }
    const Error error =
        test::error_of([&] { rank.comm.all_reduce(sum, ReduceOp::kBitOr, "bits", rank.stream).wait(); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    test::expect_contains(error, "bit_or");
  });
}

// Without a wait on the host in between, and in buffers that are used again and again.
TEST_P(DeviceCommunicatorTest, CollectivesInFlightRunInTheOrderOfTheStreams) {
  run([](const Rank& rank) {
    constexpr std::size_t kNum = 20;
    const auto other = rank.device.make_stream();
    auto bucket = rank.make<float>(DType::kF32, rank.n * 100);
    auto shard = rank.make<float>(DType::kF32, 100);
    auto full = rank.make<float>(DType::kF32, rank.n * 100);
    auto seen = rank.make<float>(DType::kF32, kNum);
    shard.set(rank.stream, 1.0f);
    for (std::size_t k = 0; k < kNum; ++k) {
      bucket.set(rank.stream, static_cast<float>(k));
      rank.comm.reduce_scatter_add(bucket, shard, "bucket", false, rank.stream).wait(rank.stream);
      const Work gather = rank.comm.all_gather(shard, full, "gather", rank.stream);
      gather.wait(*other);  // another stream than the one it came after
      rank.machine.simulation().enqueue(other->handle, [from = full.view().as<float>() + rank.n * 100 - 1,
                                                        to = seen.view().as<float>() + k] { *to = *from; });
      const auto read = rank.device.make_event();
      read->record(*other);
      read->order(rank.stream);
    }
    const auto values = seen.get(rank.stream);
    for (std::size_t k = 0; k < kNum; ++k) EXPECT_EQ(values[k], static_cast<float>(1 + rank.n * (k * (k + 1) / 2)));
    rank.device.synchronize(*other);
  });
}

// A buffer may be dropped as soon as the collective was told to keep it.
TEST_P(DeviceCommunicatorTest, KeptMemoryLivesUntilTheEnd) {
  run([](const Rank& rank) {
    auto shard = rank.make<float>(DType::kF32, 600);
    shard.set(rank.stream, 0.0f);
    for (int k = 0; k < 10; ++k) {
      auto bucket = rank.make<float>(DType::kF32, 600 * rank.n);
      bucket.set(rank.stream, 1.0f);
      rank.comm.reduce_scatter_add(bucket, shard, "kept", false, rank.stream)
          .keep(std::make_shared<Memory>(bucket.memory()));
    }
    const Work last = rank.comm.all_gather(shard, "last", rank.stream);
    last.wait();
    EXPECT_EQ(shard.get(rank.stream)[0], static_cast<float>(10 * rank.n));
  });
}

// What peers send is received into memory that lives as long as it is in use.
TEST_P(DeviceCommunicatorTest, LargerCollectivesFollowWithoutAWait) {
  run([](const Rank& rank) {
    std::vector<Array<float>> buckets, shards;
    for (std::size_t numel = 1; numel <= 4096; numel *= 4) {
      buckets.push_back(rank.make<float>(DType::kF32, rank.n * numel));
      shards.push_back(rank.make<float>(DType::kF32, numel));
    }
    for (std::size_t k = 0; k < buckets.size(); ++k) {
      buckets[k].set(rank.stream, static_cast<float>(k));
      rank.comm.reduce_scatter_add(buckets[k], shards[k], "larger", true, rank.stream);
    }
    const Work last = rank.comm.reduce_scatter_add(buckets[0], shards[0], "last", false, rank.stream);
    last.wait(rank.stream);
    for (std::size_t k = 0; k < buckets.size(); ++k) {
      const auto sum = static_cast<float>(rank.n * k);
      EXPECT_EQ(shards[k].get(rank.stream), std::vector<float>(static_cast<std::size_t>(shards[k].view().numel), sum));
    }
  });
}

TEST_P(DeviceCommunicatorTest, HostMemoryGoesItsOwnWay) {
  run([](const Rank& rank) {
    auto data = rank.make<std::int64_t>(DType::kI64, 10);
    data.set(rank.stream, 1);
    const Work pending = rank.comm.all_reduce(data, ReduceOp::kSum, "device", rank.stream);
    std::int64_t bits = 1 << rank.comm.rank();
    rank.comm.all_reduce({&bits, 1}, ReduceOp::kBitOr, "host").wait();
    EXPECT_EQ(bits, (1 << rank.n) - 1);
    rank.comm.barrier("host").wait();
    const char own = static_cast<char>('a' + rank.comm.rank());
    std::string all(rank.n, ' ');
    rank.comm.gather_bytes(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)), "host").wait();
    EXPECT_EQ(all, std::string("abcd").substr(0, rank.n));
    pending.wait(rank.stream);
    EXPECT_EQ(data.get(rank.stream)[9], static_cast<std::int64_t>(rank.n));
    EXPECT_EQ(rank.comm.counters()[static_cast<std::size_t>(Op::kAllReduce)].calls, 2);
  });
}

TEST_P(DeviceCommunicatorTest, SplitMakesGroupsOfTheirOwn) {
  run([](const Rank& rank) {
    const auto parity = rank.comm.split(rank.comm.rank() % 2, -rank.comm.rank());  // reversed
    const int members = (rank.comm.size() + 1 - rank.comm.rank() % 2) / 2;
    ASSERT_EQ(parity->size(), members);
    ASSERT_EQ(parity->rank(), members - 1 - rank.comm.rank() / 2);
    auto ranks = rank.make<std::int64_t>(DType::kI64, static_cast<std::size_t>(members));
    auto all = rank.make<std::int64_t>(DType::kI64, rank.n);
    ranks.set(rank.stream, rank.comm.rank());
    all.set(rank.stream, rank.comm.rank());
    const Work works[] = {parity->all_gather(ranks, "who", rank.stream), rank.comm.all_gather(all, "all", rank.stream)};
    for (const Work& work : works) work.wait(rank.stream);
    const auto got = ranks.get(rank.stream);
    for (int i = 0; i < members; ++i) {
      EXPECT_EQ(got[static_cast<std::size_t>(i)], 2 * (members - 1 - i) + rank.comm.rank() % 2);
    }
    std::vector<std::int64_t> expected(rank.n);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all.get(rank.stream), expected);
  });
}

TEST_P(DeviceCommunicatorTest, MemoryIsZeroed) {
  run([](const Rank& rank) {
    const Memory memory = rank.comm.allocate(1000);
    std::vector<std::byte> values(1000, std::byte{1});
    rank.device.copy({memory.get(), 1000, DType::kU8, rank.device.id()}, {values.data(), 1000, DType::kU8, {}},
                     rank.stream);
    rank.device.synchronize(rank.stream);
    EXPECT_EQ(values, std::vector<std::byte>(1000));
  });
}

TEST_P(DeviceCommunicatorTest, AQuietEndIsNoFailure) {
  run([](const Rank& rank) {
    auto data = rank.make<float>(DType::kF32, rank.n);
    data.set(rank.stream, 1.0f);
    rank.comm.all_gather(data, "last", rank.stream).wait();
    rank.comm.barrier("last").wait();
    rank.comm.leave(comm::Departure::kEnded, "ended its script", std::chrono::seconds(10));
    EXPECT_EQ(rank.comm.failure().find("failed"), std::string::npos);
    EXPECT_THROW(rank.comm.all_gather(data, "after", rank.stream).wait(), Error);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceCommunicatorTest, testing::ValuesIn([] {
                           std::vector<World> worlds;
                           for (const char* backend : {"nccl", "staged"}) {
                             for (int size : {1, 2, 3, 4}) {
                               for (unsigned seed : {0u, 1u, 2u, 3u}) worlds.push_back({backend, size, seed});
                             }
                           }
                           return worlds;
                         }()),
                         [](const auto& info) {
                           return info.param.backend + std::to_string(info.param.size) + "_seed" +
                                  std::to_string(info.param.seed);
                         });

}  // namespace
}  // namespace zc::cuda
