#include "zc/zero/grad_reducer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>

#include "support/ranks.h"

namespace zc::zero {
namespace {

constexpr std::int64_t kNumel = 1024;

// Three parameters, a bucket each (2, 1, 0 in bucket order), with the accumulators of this rank.
struct Fixture {
  std::vector<ParamSpec> params{
      {"a", kNumel, DType::kF32, 0}, {"b", kNumel, DType::kF32, 0}, {"c", kNumel, DType::kF32, 0}};
  ShardLayout layout;
  std::vector<Memory> memory;
  std::vector<Bucket> buckets;
  std::unique_ptr<GradReducer> reducer;
  std::vector<std::vector<float>> grads;
  int rank;

  // frozen: a parameter that is not trained.
  explicit Fixture(const std::shared_ptr<comm::Communicator>& comm, DType dtype = DType::kF32, int frozen = -1,
                   bool peers_may_wait = false)
      : layout(with_frozen(params, frozen), comm->size(), kNumel),
        buckets(layout.buckets().size()),
        grads(3),
        rank(comm->rank()) {
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      const std::int64_t shard = layout.buckets()[b].shard_numel;
      memory.push_back(allocate_host(shard * 4));
      buckets[b].label = "bucket " + std::to_string(b);
      if (!layout.buckets()[b].trainable) continue;
      buckets[b].grad_shard = {memory.back().get(), shard, DType::kF32, {}};
    }
    reducer = std::make_unique<GradReducer>(comm, device::cpu_device(), layout, buckets, dtype, 2, nullptr,
                                            peers_may_wait ? comm : nullptr);
  }

  static std::span<const ParamSpec> with_frozen(std::vector<ParamSpec>& params, int frozen) {
    if (frozen >= 0) params[static_cast<std::size_t>(frozen)].trainable = false;
    return params;
  }

  std::vector<int> ready(int param, float value) {
    auto& grad = grads[static_cast<std::size_t>(param)];
    grad.assign(kNumel, value);
    const auto launched = reducer->ready(param, {grad.data(), kNumel, DType::kF32, {}});
    return {launched.begin(), launched.end()};
  }

  // The first element of a parameter's accumulator; every parameter lies in rank 0's shard.
  float sum(int param) {
    reducer->wait();
    return buckets[static_cast<std::size_t>(layout.location(param).bucket)].grad_shard.as<float>()[0];
  }
};

using Ranks = std::shared_ptr<comm::Communicator>;

TEST(GradReducerTest, LaunchesAtTheEndWhileRecordingThenInRecordedOrder) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    f.reducer->begin_micro_step(true);
    EXPECT_TRUE(f.ready(1, 1).empty());
    EXPECT_TRUE(f.ready(0, 1).empty());
    EXPECT_TRUE(f.ready(2, 1).empty());
    EXPECT_TRUE(f.reducer->end_micro_step().empty());
    // Recorded order of parameters: 1, 0, 2, i.e. buckets 1, 2, 0.
    f.reducer->begin_micro_step(true);
    EXPECT_TRUE(f.ready(0, 1).empty());  // waits for parameter 1's bucket
    EXPECT_EQ(f.ready(1, 1), (std::vector<int>{1, 2}));
    EXPECT_EQ(f.ready(2, 1), (std::vector<int>{0}));
    EXPECT_TRUE(f.reducer->end_micro_step().empty());
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(0), 4);
    }
  });
}

TEST(GradReducerTest, AnArrivalMayBeNotedWithoutLaunching) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    for (int step = 0; step < 2; ++step) {
      f.reducer->begin_micro_step(true);
      for (int p : {2, 1, 0}) {
        f.grads[static_cast<std::size_t>(p)].assign(kNumel, 1);
        const BufferView grad{f.grads[static_cast<std::size_t>(p)].data(), kNumel, DType::kF32, {}};
        EXPECT_TRUE(f.reducer->ready(p, grad, false).empty());
      }
      EXPECT_TRUE(f.reducer->end_micro_step().empty());
    }
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(1), 4);
    }
  });
}

TEST(GradReducerTest, AFillerThatAloneUsesAParameterLeavesItUnusedAndIsNeverLate) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    for (int step = 0; step < 3; ++step) {
      f.reducer->begin_micro_step(f.rank == 0);
      for (int p : {2, 1}) f.ready(p, 1);
      if (f.rank == 1) f.ready(0, 1);
      if (f.rank == 1 && step == 1) f.ready(2, 1);  // after its bucket went
      EXPECT_TRUE(f.reducer->end_micro_step().empty());
    }
    EXPECT_EQ(f.reducer->used()[0], 0);
    EXPECT_EQ(f.reducer->used()[2], 1);
  });
}

TEST(GradReducerTest, ARankWithoutRoomLaunchesWhileItRecords) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    if (f.rank == 0) f.reducer->set_hold_bytes(2 * kNumel * 4);  // two gradients
    for (int step = 0; step < 2; ++step) {
      f.reducer->begin_micro_step(true);
      std::vector<int> launched;
      for (int p : {1, 2, 0}) {
        for (int bucket : f.ready(p, 1)) launched.push_back(bucket);
      }
      // The first micro-step launches in the order of buckets (parameters 2, 1, 0), the second in the recorded one.
      EXPECT_EQ(launched, step == 0 ? (f.rank == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{})
                                    : (std::vector<int>{1, 0, 2}));
      EXPECT_TRUE(f.reducer->end_micro_step().empty());
    }
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(0), 4);
    }
  });
}

TEST(GradReducerTest, AnArrivalAfterALaunchForWantOfRoomIsLateAndCarried) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    if (f.rank == 0) f.reducer->set_hold_bytes(0);
    f.reducer->begin_micro_step(true);
    for (int p : {2, 1, 0}) f.ready(p, 1);
    if (f.rank == 0) f.ready(2, 10);
    EXPECT_EQ(f.reducer->end_micro_step(), std::vector<int>{2});
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(2), 12);
    }
  });
}

TEST(GradReducerTest, SeveralArrivalsAreFoldedOnce) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    for (int step = 0; step < 3; ++step) {
      f.reducer->begin_micro_step(true);
      for (int p : {2, 1, 0}) f.ready(p, 1);
      for (int p : {2, 1, 0}) f.ready(p, 5);  // the framework's running sum of both arrivals
      EXPECT_TRUE(f.reducer->end_micro_step().empty()) << "step " << step;
    }
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(1), 3 * 2 * 5);
    }
  });
}

TEST(GradReducerTest, RanksThatUseOtherParametersNeverHangAndUsageIsAgreed) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    for (int step = 0; step < 3; ++step) {
      f.reducer->begin_micro_step(true);
      f.ready(f.rank, 2);
      EXPECT_TRUE(f.reducer->end_micro_step().empty());
    }
    const std::vector<std::uint8_t> used(f.reducer->used().begin(), f.reducer->used().end());
    EXPECT_EQ(used, (std::vector<std::uint8_t>{1, 1, 0}));
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(0), 6);
      EXPECT_EQ(f.sum(1), 6);
      EXPECT_EQ(f.sum(2), 0);
    }
    f.reducer->reset();
    EXPECT_EQ(f.reducer->used()[0], 0);
  });
}

TEST(GradReducerTest, AfterAResetAccumulatorsCountAsZeroWhateverTheyHold) {
  for (int num_ranks : {1, 2}) {
    test::run_ranks(num_ranks, [](Ranks comm) {
      Fixture f(comm);
      for (int step = 0; step < 2; ++step) {
        for (const Bucket& bucket : f.buckets) {
          std::fill_n(bucket.grad_shard.as<float>(), bucket.grad_shard.numel, std::nanf(""));
        }
        EXPECT_FALSE(f.reducer->folded(0));
        for (int k = 0; k < 2; ++k) {
          f.reducer->begin_micro_step(true);
          f.ready(0, 2);
          f.ready(1, 3);
          f.reducer->end_micro_step();
        }
        EXPECT_TRUE(f.reducer->folded(0));
        if (f.rank == 0) {
          EXPECT_EQ(f.sum(0), 4 * comm->size());
          EXPECT_EQ(f.sum(1), 6 * comm->size());
          EXPECT_EQ(f.sum(2), 0);  // used by nobody
        }
        f.reducer->reset();
      }
      for (int bucket : {0, 1, 2}) f.reducer->settle(bucket);
      if (f.rank == 0) {
        EXPECT_EQ(f.sum(0), 0);
      }
    });
  }
}

TEST(GradReducerTest, ALateArrivalIsCarriedByAnExtraRoundAndRecordedAnew) {
  test::run_ranks(2, [](Ranks comm) {
    Fixture f(comm);
    f.reducer->begin_micro_step(true);
    for (int p : {2, 1, 0}) f.ready(p, 1);
    f.reducer->end_micro_step();
    f.reducer->begin_micro_step(true);
    for (int p : {2, 1, 0}) f.ready(p, 1);
    if (f.rank == 1) f.ready(2, 10);  // its bucket has gone
    EXPECT_EQ(f.reducer->end_micro_step(), std::vector<int>{2});
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(2), 2 + 2 + 10);
    }
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(1), 4);
    }
    f.reducer->begin_micro_step(true);
    for (int p : {2, 1, 0}) EXPECT_TRUE(f.ready(p, 1).empty());
    if (f.rank == 1) f.ready(2, 2);
    EXPECT_TRUE(f.reducer->end_micro_step().empty());
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(2), 14 + 1 + 2);
    }
  });
}

TEST(GradReducerTest, ARankWithoutAMicroBatchAddsNothing) {
  test::run_ranks(3, [](Ranks comm) {
    Fixture f(comm);
    for (int step = 0; step < 3; ++step) {
      f.reducer->begin_micro_step(f.rank != 2);
      for (int p : {2, 1, 0}) f.ready(p, f.rank == 2 ? 1000.0f : 1.0f);
      EXPECT_TRUE(f.reducer->end_micro_step().empty());
    }
    if (f.rank == 0) {
      EXPECT_EQ(f.sum(0), 6);
    }
  });
}

TEST(GradReducerTest, OneRankNeedsNoPool) {
  test::run_ranks(1, [](Ranks comm) {
    Fixture f(comm);
    EXPECT_EQ(f.reducer->pool_bytes(), 0);
    for (int step = 0; step < 2; ++step) {
      f.reducer->begin_micro_step(true);
      f.ready(0, 3);
      f.reducer->end_micro_step();
    }
    EXPECT_EQ(f.sum(0), 6);
    EXPECT_EQ(f.sum(1), 0);
  });
}

// fp32 gradients that travel as bf16 are rounded on one rank, too.
TEST(GradReducerTest, TheReduceDtypeGivesTheSameBitsOnAnyNumberOfRanks) {
  constexpr int kMicroBatches = 6;
  const auto gradient = [](int micro_batch) { return 1.0f + 0.001f * static_cast<float>(micro_batch); };
  float expected = 0;
  for (int j = 0; j < kMicroBatches; ++j) {
    const float value = gradient(j);
    std::uint16_t rounded = 0;
    float widened = 0;
    auto& kernels = device::cpu_kernels();
    kernels.cast({const_cast<float*>(&value), 1, DType::kF32, {}}, {&rounded, 1, DType::kBF16, {}}, {});
    kernels.cast({&rounded, 1, DType::kBF16, {}}, {&widened, 1, DType::kF32, {}}, {});
    expected += widened;
  }
  for (int num_ranks : {1, 2, 3}) {
    test::run_ranks(num_ranks, [&](Ranks comm) {
      Fixture f(comm, DType::kBF16);
      for (int k = 0; k < kMicroBatches / num_ranks; ++k) {
        f.reducer->begin_micro_step(true);
        for (int p : {2, 1, 0}) f.ready(p, gradient(k * num_ranks + f.rank));
        EXPECT_TRUE(f.reducer->end_micro_step().empty());
      }
      for (int p : {0, 1, 2}) {
        const float sum = f.sum(p);
        if (f.rank == 0) {
          EXPECT_EQ(sum, expected) << num_ranks << " ranks";
        }
      }
      const std::int64_t bucket_numel = num_ranks * kNumel;  // padded to a block a rank
      EXPECT_EQ(f.reducer->pool_bytes(), num_ranks == 1 ? 0 : 2 * bucket_numel * 2);
    });
  }
}

TEST(GradReducerTest, WhatIsNotTrainedIsLeftOut) {
  for (int num_ranks : {1, 3}) {
    test::run_ranks(num_ranks, [](Ranks comm) {
      Fixture f(comm, DType::kF32, 1);
      const auto reductions = [&] {
        return comm->counters()[static_cast<std::size_t>(comm::Op::kReduceScatterAdd)].calls;
      };
      for (int step = 1; step <= 3; ++step) {
        f.reducer->begin_micro_step(true);
        f.ready(2, 1);
        const auto launched = f.ready(0, 2);
        EXPECT_EQ(launched.size(), step > 1 ? 1u : 0u);
        EXPECT_TRUE(f.reducer->end_micro_step().empty());
        EXPECT_EQ(reductions(), comm->size() == 1 ? 0 : 2 * step);
      }
      f.reducer->wait();
      EXPECT_EQ(f.reducer->used()[1], 0);
      if (f.rank == 0) {
        EXPECT_EQ(f.sum(0), 3 * 2 * comm->size());
        EXPECT_EQ(f.sum(2), 3 * comm->size());
      }
    });
  }
}

// Rank 1 uses nothing until rank 0 has passed all on, as when it waits for a gather that rank 0 joins later.
TEST(GradReducerTest, ALaunchDoesNotWaitForPeersThatMayWait) {
  std::promise<void> passed_on;
  std::future<void> may_go = passed_on.get_future();
  test::run_ranks(2, [&](Ranks comm) {
    Fixture f(comm, DType::kF32, -1, true);
    for (int step = 0; step < 2; ++step) {
      f.reducer->begin_micro_step(true);
      if (step == 1 && f.rank == 1) may_go.wait();
      std::size_t launched = 0;
      for (int p : {2, 1, 0}) launched += f.ready(p, 1).size();
      if (step == 1 && f.rank == 0) {
        EXPECT_EQ(launched, 2u);  // there are two buffers
        passed_on.set_value();
      }
      EXPECT_TRUE(f.reducer->end_micro_step().empty());
    }
    for (int p : {0, 1, 2}) {
      const float sum = f.sum(p);
      if (f.rank == 0) {
        EXPECT_EQ(sum, 4);
      }
    }
  });
}

TEST(GradReducerTest, NothingTrainedIsNothingToReduce) {
  test::run_ranks(2, [](Ranks comm) {
    std::vector<ParamSpec> params(2, {.name = "p", .numel = kNumel, .trainable = false});
    const ShardLayout layout(params, comm->size(), kNumel);
    const std::vector<Bucket> buckets(layout.buckets().size());
    GradReducer reducer(comm, device::cpu_device(), layout, buckets, DType::kF32, 2, nullptr, nullptr);
    EXPECT_EQ(reducer.pool_bytes(), 0);
    for (int step = 0; step < 2; ++step) {
      reducer.begin_micro_step(true);
      EXPECT_TRUE(reducer.end_micro_step().empty());
      reducer.wait();
    }
  });
}

TEST(GradReducerTest, MisuseIsAnError) {
  test::run_ranks(1, [](Ranks comm) {
    Fixture f(comm);
    EXPECT_THROW(f.ready(0, 1), Error);
    EXPECT_THROW(f.reducer->end_micro_step(), Error);
    f.reducer->begin_micro_step(true);
    EXPECT_THROW(f.reducer->begin_micro_step(true), Error);
  });
}

}  // namespace
}  // namespace zc::zero
