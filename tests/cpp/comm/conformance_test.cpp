// What every communicator must do, over every backend that needs no launcher. Values are exactly representable and the
// expected results closed-form, so bits are compared. tests/python/test_comm.py asks the same of MPI.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "support/ranks.h"
#include "zc/comm/self_communicator.h"

namespace zc::comm {
namespace {

struct World {
  const char* backend;
  int size;
};

template <class T>
BufferView view(std::vector<T>& values, DType dtype) {
  return {values.data(), static_cast<std::int64_t>(values.size()), dtype, {}};
}

std::uint16_t bf16(float value) {  // of values that bf16 holds
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

class ConformanceTest : public testing::TestWithParam<World> {
 protected:
  void run(const std::function<void(Communicator&)>& body) {
    if (std::string(GetParam().backend) == "self") {
      body(*make_self_communicator());
    } else {
      test::run_ranks(
          GetParam().size, [&](std::shared_ptr<Communicator> comm) { body(*comm); }, {std::chrono::seconds(20)},
          GetParam().backend);
    }
  }
};

TEST_P(ConformanceTest, KnowsItsPlace) {
  std::atomic<int> seen{0};
  run([&](Communicator& comm) {
    EXPECT_STREQ(comm.backend(), GetParam().backend);
    EXPECT_EQ(comm.size(), GetParam().size);
    seen |= 1 << comm.rank();
  });
  EXPECT_EQ(seen, (1 << GetParam().size) - 1);
}

TEST_P(ConformanceTest, ReduceScatterAddSumsSlices) {
  run([](Communicator& comm) {
    const int n = comm.size();
    for (const std::int64_t numel : {0, 1, 1023, 700'001}) {  // the last one takes several pieces
      std::vector<float> bucket(static_cast<std::size_t>(n * numel));
      for (std::size_t i = 0; i < bucket.size(); ++i) {
        bucket[i] = static_cast<float>(i % 1000 + 1000 * static_cast<std::size_t>(comm.rank()));
      }
      const auto before = bucket;
      std::vector<float> shard(static_cast<std::size_t>(numel), 0.5f);
      comm.reduce_scatter_add(view(bucket, DType::kF32), view(shard, DType::kF32), "sum").wait();
      for (std::int64_t i = 0; i < numel; ++i) {
        const auto at = (comm.rank() * numel + i) % 1000;
        ASSERT_EQ(shard[static_cast<std::size_t>(i)], 0.5f + static_cast<float>(n * at + 1000 * n * (n - 1) / 2)) << i;
      }
      ASSERT_EQ(bucket, before);
    }
  });
}

TEST_P(ConformanceTest, TheFirstSumTakesNothingFromTheShard) {
  run([](Communicator& comm) {
    const int n = comm.size();
    for (const std::int64_t numel : {1, 100'001}) {
      const Memory memory = comm.allocate(n * numel * 4);  // what peers read in place
      std::vector<float> private_bucket(static_cast<std::size_t>(n * numel), -0.0f);
      for (float* bucket : {reinterpret_cast<float*>(memory.get()), private_bucket.data()}) {
        std::fill_n(bucket, n * numel, -0.0f);
        std::vector<float> shard(static_cast<std::size_t>(numel), std::nanf(""));
        const BufferView in{bucket, n * numel, DType::kF32, {}};
        comm.reduce_scatter_add(in, view(shard, DType::kF32), "first", true).wait();
        for (const float value : shard) ASSERT_EQ(std::bit_cast<std::uint32_t>(value), 0u);  // +0 + -0 is +0
        std::fill_n(bucket, n * numel, 1.5f);
        comm.barrier("all have filled theirs").wait();
        comm.reduce_scatter_add(in, view(shard, DType::kF32), "second").wait();
        for (const float value : shard) ASSERT_EQ(value, 1.5f * static_cast<float>(n));
      }
    }
  });
}

TEST_P(ConformanceTest, SharedMemoryIsOneForAll) {
  run([](Communicator& comm) {
    constexpr std::int64_t kNumel = 5000;
    const Memory memory = comm.allocate_shared(comm.size() * kNumel * 4, "share");
    Memory again = comm.allocate_shared(1, "share a byte");
    auto* values = reinterpret_cast<std::int32_t*>(memory.get());
    for (std::int64_t i = 0; i < comm.size() * kNumel; ++i) ASSERT_EQ(values[i], 0);
    comm.barrier("all have looked").wait();
    std::iota(values + comm.rank() * kNumel, values + (comm.rank() + 1) * kNumel, comm.rank() * 10'000);
    if (comm.rank() == 0) again = nullptr;  // the others keep theirs
    comm.barrier("all have written").wait();
    for (std::int64_t i = 0; i < comm.size() * kNumel; ++i) ASSERT_EQ(values[i], i / kNumel * 10'000 + i % kNumel);
    if (again != nullptr) {
      EXPECT_EQ(again[0], std::byte{0});
    }
    const auto half = comm.split(comm.rank() % 2, comm.rank());
    const Memory of_half = half->allocate_shared(8, "share in a group");
    std::atomic_ref<std::int64_t> sum(*reinterpret_cast<std::int64_t*>(of_half.get()));
    sum += 1 << comm.rank();
    half->barrier("all have added").wait();
    std::int64_t expected = 0;
    for (int r = comm.rank() % 2; r < comm.size(); r += 2) expected += 1 << r;
    EXPECT_EQ(sum.load(), expected);
  });
}

TEST_P(ConformanceTest, ReduceScatterAddFoldsInRankOrder) {
  run([](Communicator& comm) {
    // In fp32 1e8 + 1 is 1e8, so only the order of ranks gives these results.
    const float terms[] = {1.0f, 1e8f, -1e8f, 3.0f};
    const float sums[] = {1.0f, 1e8f, 0.0f, 3.0f};
    std::vector<float> bucket(static_cast<std::size_t>(comm.size()) * 5, terms[comm.rank()]);
    std::vector<float> shard(5, 0.0f);
    comm.reduce_scatter_add(view(bucket, DType::kF32), view(shard, DType::kF32), "order").wait();
    EXPECT_EQ(shard, std::vector<float>(5, sums[comm.size() - 1]));
  });
}

TEST_P(ConformanceTest, ReduceScatterAddSumsHalfTypesInFp32) {
  run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    // 1 + 2^-10 needs 11 bits: neither bf16 nor an fp16 sum of four could hold what fp32 does.
    const float scale = static_cast<float>(1 << comm.rank());
    std::vector<std::uint16_t> bucket(n * 3, bf16(comm.rank() % 2 == 0 ? scale : 1.0f / 1024));
    std::vector<float> shard(3, 0.0f);
    comm.reduce_scatter_add(view(bucket, DType::kBF16), view(shard, DType::kF32), "bf16").wait();
    const float sums[] = {1.0f, 1 + 1.0f / 1024, 5 + 1.0f / 1024, 5 + 2.0f / 1024};
    EXPECT_EQ(shard, std::vector<float>(3, sums[n - 1]));

    std::fill(bucket.begin(), bucket.end(), comm.rank() % 2 == 0 ? 0x6800 : 0x3800);  // 2048 and 0.5 in fp16
    std::fill(shard.begin(), shard.end(), 0.0f);
    comm.reduce_scatter_add(view(bucket, DType::kF16), view(shard, DType::kF32), "fp16").wait();
    const float half_sums[] = {2048.0f, 2048.5f, 4096.5f, 4097.0f};
    EXPECT_EQ(shard, std::vector<float>(3, half_sums[n - 1]));
  });
}

TEST_P(ConformanceTest, ReduceScatterAddRoundsToTheShardsDtypeAfterEachRank) {
  run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    constexpr std::size_t kNumel = 200'001;  // several pieces
    // Rank 0 gives 1, the others half of its last place: each such sum is a tie, and rounds back to 1.
    const auto check = [&](DType dtype, std::uint16_t one, float half_place) {
      std::vector<float> bucket(n * kNumel, comm.rank() == 0 ? 1.0f : half_place);
      std::vector<std::uint16_t> shard(kNumel, 0);
      comm.reduce_scatter_add(view(bucket, DType::kF32), view(shard, dtype), "rounded").wait();
      EXPECT_EQ(shard, std::vector<std::uint16_t>(kNumel, one));
    };
    check(DType::kBF16, 0x3f80, 0x1p-8f);
    check(DType::kF16, 0x3c00, 0x1p-11f);

    std::vector<std::uint16_t> bucket(n * kNumel, bf16(1.0f)), shard(kNumel, bf16(256.0f));
    comm.reduce_scatter_add(view(bucket, DType::kBF16), view(shard, DType::kBF16), "bf16").wait();
    EXPECT_EQ(shard, std::vector<std::uint16_t>(kNumel, bf16(256.0f)));  // 257 is a tie
  });
}

TEST_P(ConformanceTest, AllGatherFillsEverySlice) {
  run([](Communicator& comm) {
    for (const std::size_t slice : {0u, 1u, 333u, 2'500'000u}) {
      std::vector<std::uint16_t> full(slice * static_cast<std::size_t>(comm.size()), 0xffff);
      const auto value = [slice](std::size_t at) { return static_cast<std::uint16_t>(at % 977 + at / slice); };
      const std::size_t begin = slice * static_cast<std::size_t>(comm.rank());
      for (std::size_t at = begin; at < begin + slice; ++at) full[at] = value(at);
      comm.all_gather(view(full, DType::kBF16), "gather").wait();
      for (std::size_t at = 0; at < full.size(); ++at) ASSERT_EQ(full[at], value(at)) << at;
    }
  });
}

TEST_P(ConformanceTest, AllGatherTakesAShardFromElsewhere) {
  run([](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto n = static_cast<std::size_t>(comm.size());
    for (const std::size_t slice : {0u, 1u, 333u, 9'000'001u}) {  // the last one takes two pieces
      const auto value = [slice](std::size_t at) { return static_cast<std::uint16_t>(at % 977 + at / slice); };
      std::vector<std::uint16_t> full(slice * n, 0xffff), shard(slice);
      for (std::size_t at = 0; at < slice; ++at) shard[at] = value(rank * slice + at);
      const auto before = shard;
      comm.all_gather(view(shard, DType::kBF16), view(full, DType::kBF16), "gather").wait();
      std::size_t wrong = 0;
      for (std::size_t at = 0; at < full.size(); ++at) wrong += full[at] != value(at);
      ASSERT_EQ(wrong, 0u);
      ASSERT_EQ(shard, before);
    }
    // The own slice is a shard too, and ranks may mix the forms.
    std::vector<float> full(n * 5, -1.0f), shard(5, static_cast<float>(rank));
    const BufferView whole = view(full, DType::kF32);
    const BufferView own = whole.slice(comm.rank() * 5, 5);
    std::copy(shard.begin(), shard.end(), own.as<float>());
    if (rank % 3 == 0) comm.all_gather(own, whole, "mixed").wait();
    if (rank % 3 == 1) comm.all_gather(whole, "mixed").wait();
    if (rank % 3 == 2) comm.all_gather(view(shard, DType::kF32), whole, "mixed").wait();
    for (std::size_t at = 0; at < full.size(); ++at) ASSERT_EQ(full[at], static_cast<float>(at / 5)) << at;
    EXPECT_EQ(comm.counters()[static_cast<std::size_t>(Op::kAllGather)].elements,
              static_cast<std::int64_t>(n * (1 + 333 + 9'000'001 + 5)));
  });
}

TEST_P(ConformanceTest, BroadcastCopiesTheRoots) {
  run([](Communicator& comm) {
    for (int root = 0; root < comm.size(); ++root) {
      for (const std::size_t numel : {0u, 1u, root == 0 ? 333u : 17'000'003u}) {  // the last one takes two pieces
        std::vector<std::uint8_t> data(numel, static_cast<std::uint8_t>(comm.rank() + 1));
        if (numel > 0) data.back() = static_cast<std::uint8_t>(100 + comm.rank());
        comm.broadcast(view(data, DType::kU8), root, "broadcast").wait();
        std::vector<std::uint8_t> expected(numel, static_cast<std::uint8_t>(root + 1));
        if (numel > 0) expected.back() = static_cast<std::uint8_t>(100 + root);
        ASSERT_TRUE(data == expected) << "root " << root << ", numel " << numel;
      }
    }
  });
}

TEST_P(ConformanceTest, AllReduceIsExact) {
  run([](Communicator& comm) {
    const std::int64_t n = comm.size();
    const std::int64_t rank = comm.rank();
    const std::int64_t large = std::int64_t{1} << 60;  // a double would lose the low bits
    for (const std::size_t numel : {0u, 1u, 70u, 128u, 129u, 300'000u}) {
      const auto filled = [&](const auto& value) {
        std::vector<std::int64_t> values(numel);
        for (std::size_t i = 0; i < numel; ++i) values[i] = value(static_cast<std::int64_t>(i));
        return values;
      };
      auto sum = filled([&](std::int64_t i) { return large + i * (rank + 1); });
      auto max = filled([&](std::int64_t i) { return (i + rank) % n - large; });
      auto bits = filled([&](std::int64_t i) { return (std::int64_t{1} << (10 * rank)) | (i & 1) << 62; });
      comm.all_reduce(sum, ReduceOp::kSum, "sum").wait();
      comm.all_reduce(max, ReduceOp::kMax, "max").wait();
      comm.all_reduce(bits, ReduceOp::kBitOr, "bits").wait();
      ASSERT_EQ(sum, filled([&](std::int64_t i) { return n * large + i * n * (n + 1) / 2; }));
      ASSERT_EQ(max, filled([&](std::int64_t) { return n - 1 - large; }));
      ASSERT_EQ(bits, filled([&](std::int64_t i) {
                  std::int64_t all = (i & 1) << 62;
                  for (int r = 0; r < n; ++r) all |= std::int64_t{1} << (10 * r);
                  return all;
                }));
    }
  });
}

TEST_P(ConformanceTest, GatherBytesKeepsRankOrder) {
  run([](Communicator& comm) {
    for (const std::size_t length : {0u, 3u, 1024u, 1025u, 100'000u}) {
      const std::vector<std::byte> in(length, static_cast<std::byte>('a' + comm.rank()));
      std::vector<std::byte> out(length * static_cast<std::size_t>(comm.size()));
      comm.gather_bytes(in, out, "gather").wait();
      for (std::size_t at = 0; at < out.size(); ++at) {
        ASSERT_EQ(static_cast<char>(out[at]), static_cast<char>('a' + at / length)) << at;
      }
    }
  });
}

TEST_P(ConformanceTest, BarrierHoldsRanksBack) {
  std::atomic<int> entered{0};
  run([&](Communicator& comm) {
    for (int round = 1; round <= 20; ++round) {
      ++entered;
      comm.barrier("round").wait();
      ASSERT_GE(entered, round * comm.size());
    }
  });
}

TEST_P(ConformanceTest, CollectivesInFlightRunInCallOrder) {
  run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    constexpr std::size_t kNum = 60;
    std::vector<std::vector<float>> buckets, shards, fulls;
    std::vector<Work> works;
    for (std::size_t k = 0; k < kNum; ++k) {
      buckets.emplace_back(n * (k + 1), static_cast<float>(k));
      shards.emplace_back(k + 1, 1.0f);
      fulls.emplace_back(n, static_cast<float>(comm.rank()));
    }
    std::int64_t total = 1;  // in place: grows by a factor of n with each call
    for (std::size_t k = 0; k < kNum; ++k) {
      works.push_back(comm.reduce_scatter_add(view(buckets[k], DType::kF32), view(shards[k], DType::kF32), "bucket"));
      if (k < 10) works.push_back(comm.all_reduce({&total, 1}, ReduceOp::kSum, "grow"));
      works.push_back(comm.all_gather(view(fulls[k], DType::kF32), "gather"));
    }
    std::reverse(works.begin(), works.end());
    for (const Work& work : works) work.wait();
    for (const Work& work : works) EXPECT_TRUE(work.done());
    EXPECT_EQ(total, static_cast<std::int64_t>(std::pow(n, 10)));
    for (std::size_t k = 0; k < kNum; ++k) {
      EXPECT_EQ(shards[k], std::vector<float>(k + 1, static_cast<float>(1 + k * n)));
      for (std::size_t r = 0; r < n; ++r) EXPECT_EQ(fulls[k][r], static_cast<float>(r));
    }
  });
}

TEST_P(ConformanceTest, SplitMakesGroupsInKeyOrder) {
  run([](Communicator& comm) {
    const auto parity = comm.split(comm.rank() % 2, -comm.rank());  // reversed
    const int members = (comm.size() + 1 - comm.rank() % 2) / 2;
    ASSERT_EQ(parity->size(), members);
    ASSERT_EQ(parity->rank(), members - 1 - comm.rank() / 2);
    std::vector<std::int64_t> ranks(static_cast<std::size_t>(members));
    const std::int64_t own = comm.rank();
    for (int round = 0; round < 3; ++round) {
      parity->gather_bytes(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(ranks)), "who").wait();
      for (int i = 0; i < members; ++i) {
        EXPECT_EQ(ranks[static_cast<std::size_t>(i)], 2 * (members - 1 - i) + comm.rank() % 2);
      }
    }
    const auto nested = parity->split(0, parity->rank());
    const auto alone = comm.split(comm.rank(), 0);
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(nested->rank(), parity->rank());
    std::int64_t count = 1;
    nested->all_reduce({&count, 1}, ReduceOp::kSum, "nested").wait();
    EXPECT_EQ(count, members);
    alone->all_reduce({&count, 1}, ReduceOp::kSum, "alone").wait();
    EXPECT_EQ(count, members);
    comm.all_reduce({&count, 1}, ReduceOp::kMax, "world").wait();
    EXPECT_EQ(count, (comm.size() + 1) / 2);
  });
}

TEST_P(ConformanceTest, CountersHoldThePayloadHandedIn) {
  run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    std::vector<float> bucket(n * 12), shard(12);
    std::vector<std::int64_t> values(7);
    for (int k = 0; k < 2; ++k) {
      comm.reduce_scatter_add(view(bucket, DType::kF32), view(shard, DType::kF32), "count").wait();
    }
    comm.all_gather(view(bucket, DType::kF32), "count").wait();
    comm.all_reduce(values, ReduceOp::kMax, "count").wait();
    comm.barrier("count").wait();
    const auto counter = [&](Op op) { return comm.counters()[static_cast<std::size_t>(op)]; };
    EXPECT_EQ(counter(Op::kReduceScatterAdd).calls, 2);
    EXPECT_EQ(counter(Op::kReduceScatterAdd).elements, static_cast<std::int64_t>(2 * n * 12));
    EXPECT_EQ(counter(Op::kAllGather).elements, static_cast<std::int64_t>(n * 12));
    EXPECT_EQ(counter(Op::kAllReduce).elements, 7);
    EXPECT_EQ(counter(Op::kBarrier).calls, 1);
    EXPECT_EQ(counter(Op::kBroadcast).calls, 0);
  });
}

TEST_P(ConformanceTest, StagingIsBoundedAndReported) {
  run([](Communicator& comm) {
    EXPECT_EQ(comm.staging_bytes(), 0);
    std::vector<float> bucket(static_cast<std::size_t>(comm.size()) * 1'000'000), shard(1'000'000);
    comm.reduce_scatter_add(view(bucket, DType::kF32), view(shard, DType::kF32), "large").wait();
    const std::int64_t held = comm.staging_bytes();
    EXPECT_EQ(held > 0, comm.size() > 1);
    EXPECT_LE(held, (comm.size() - 1) * (std::int64_t{1} << 20));
    comm.reduce_scatter_add(view(bucket, DType::kF32), view(shard, DType::kF32), "large").wait();
    EXPECT_EQ(comm.staging_bytes(), held);
  });
}

TEST_P(ConformanceTest, MemoryIsZeroedAndAligned) {
  run([](Communicator& comm) {
    const Memory memory = comm.allocate(1000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 64, 0u);
    EXPECT_TRUE(std::all_of(memory.get(), memory.get() + 1000, [](std::byte b) { return b == std::byte{0}; }));
  });
}

TEST_P(ConformanceTest, AQuietEndIsNoFailure) {
  run([](Communicator& comm) {
    comm.barrier("last").wait();
    comm.leave(Departure::kEnded, "ended its script", std::chrono::seconds(10));
    EXPECT_EQ(comm.failure().find("failed"), std::string::npos);
    EXPECT_THROW(comm.barrier("after").wait(), Error);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, ConformanceTest,
                         testing::Values(World{"self", 1}, World{"local", 1}, World{"local", 2}, World{"local", 3},
                                         World{"local", 4}, World{"shm", 1}, World{"shm", 2}, World{"shm", 3},
                                         World{"shm", 4}),
                         [](const auto& info) { return info.param.backend + std::to_string(info.param.size); });

}  // namespace
}  // namespace zc::comm
