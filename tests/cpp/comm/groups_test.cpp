// Several communicators over the same ranks: each runs in its own call order and waits for no other, and a failure in
// one ends the collectives of all.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/limits.h"
#include "support/ranks.h"

namespace zc::comm {
namespace {

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string error_of(const Work& work) {
  return error_of([&] { work.wait(); });
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "it says: " << (text)

// Gathers on one communicator and reductions on another, as stage 3 has them in flight together.
class Traffic {
 public:
  Traffic(Communicator& comm, std::size_t numel)
      : gathers_(comm.split(0, comm.rank())),
        reductions_(comm.split(0, -comm.rank())),
        full_(numel * static_cast<std::size_t>(comm.size()), static_cast<float>(1 + comm.rank())),
        bucket_(full_.size(), static_cast<float>(1 << comm.rank())),
        shard_(numel, 0.5f) {}

  Work gather() { return gathers_->all_gather(view(full_), "gather"); }
  Work reduce() { return reductions_->reduce_scatter_add(view(bucket_), view(shard_), "reduce"); }

  void expect_results(int num_reductions) const {
    const auto size = static_cast<std::size_t>(gathers_->size());
    const std::size_t numel = shard_.size();
    for (std::size_t rank = 0; rank < size; ++rank) {
      ASSERT_EQ(full_[rank * numel], static_cast<float>(1 + rank));
      ASSERT_EQ(full_[(rank + 1) * numel - 1], static_cast<float>(1 + rank));
    }
    const float sum = static_cast<float>((1 << size) - 1);
    ASSERT_EQ(shard_, std::vector<float>(numel, 0.5f + sum * static_cast<float>(num_reductions)));
  }

 private:
  static BufferView view(std::vector<float>& values) {
    return {values.data(), static_cast<std::int64_t>(values.size()), DType::kF32, {}};
  }

  std::shared_ptr<Communicator> gathers_, reductions_;
  std::vector<float> full_, bucket_, shard_;
};

struct Shape {
  const char* backend;
  int size;
  std::size_t numel;  // of a rank's slice
};

class TwoGroupsTest : public testing::TestWithParam<Shape> {};

TEST_P(TwoGroupsTest, AreUsedInOppositeOrder) {
  const auto [backend, size, numel] = GetParam();
  test::run_ranks(
      size,
      [numel = numel](std::shared_ptr<Communicator> comm) {
        Traffic traffic(*comm, numel);
        constexpr int kRounds = 4;
        std::vector<Work> works;
        for (int i = 0; i < 2 * kRounds; ++i) {
          const bool first_half = i < kRounds;
          works.push_back(first_half == (comm->rank() % 2 == 0) ? traffic.gather() : traffic.reduce());
        }
        for (const Work& work : works) work.wait();
        traffic.expect_results(kRounds);
      },
      {kLong}, backend);
}

TEST_P(TwoGroupsTest, OneWorksWhileTheOtherWaitsForALateRank) {
  const auto [backend, size, numel] = GetParam();
  test::run_ranks(
      size,
      [numel = numel](std::shared_ptr<Communicator> comm) {
        Traffic traffic(*comm, numel);
        Work gather;
        if (comm->rank() != 0) gather = traffic.gather();
        for (int i = 0; i < 3; ++i) traffic.reduce().wait();
        if (comm->rank() == 0) gather = traffic.gather();
        gather.wait();
        traffic.expect_results(3);
      },
      {kLong}, backend);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const char* backend : {"local", "shm"}) {
    for (const int size : {2, 3, 4}) all.push_back({backend, size, 1});
    all.push_back({backend, 2, 5'000'000});  // two pieces
    all.push_back({backend, 3, 500'000});
    all.push_back({backend, 4, 500'000});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, TwoGroupsTest, testing::ValuesIn(shapes()), [](const auto& info) {
  return info.param.backend + std::to_string(info.param.size) + "x" + std::to_string(info.param.numel);
});

class GroupsTest : public testing::TestWithParam<const char*> {};

TEST_P(GroupsTest, AFailureInOneEndsWhatIsPendingInTheOthers) {
  const auto start = Clock::now();
  test::run_ranks(
      3,
      [](std::shared_ptr<Communicator> comm) {
        const auto group = comm->split(comm->rank() / 2, 0);  // ranks 0 and 1
        Work pending, queued;
        if (comm->rank() != 1) pending = comm->barrier("end of the step");
        if (comm->rank() == 0) queued = comm->barrier("next step");
        if (comm->rank() == 2) {
          EXPECT_SAYS(error_of(pending), "reports a failure ([comm] ranks are in different collectives");
          return;
        }
        const std::string reason = error_of(group->barrier(comm->rank() == 0 ? "here" : "there"));
        EXPECT_SAYS(reason, "ranks are in different collectives: rank 0 is in here");
        EXPECT_EQ(comm->failure(), reason);
        if (comm->rank() == 0) {
          EXPECT_EQ(error_of(pending), reason);
          EXPECT_EQ(error_of(queued), reason);
        }
        EXPECT_EQ(error_of(comm->barrier("after")), reason);
      },
      {kLong}, GetParam());
  EXPECT_LT(Clock::now() - start, seconds(10));
}

TEST_P(GroupsTest, EachHasItsOwnTimeout) {
  const auto start = Clock::now();
  test::run_ranks(
      2,
      [](std::shared_ptr<Communicator> comm) {
        const auto impatient = comm->split(0, comm->rank());
        if (comm->rank() == 1) {
          EXPECT_SAYS(error_of(comm->barrier("reduce")), "rank 0 reports a failure ([comm] timed out");
          return;
        }
        impatient->set_timeout(milliseconds(300));
        const Work late = impatient->barrier("gather");
        const std::string reason = error_of(late);
        EXPECT_SAYS(reason, "[comm] timed out after 0.3 s in gather: rank 1 did not arrive");
        EXPECT_EQ(error_of(comm->barrier("reduce")), reason);
      },
      {kLong}, GetParam());
  EXPECT_LT(Clock::now() - start, seconds(10));
}

// A transport that never sends the payload of one context: transfers of that communicator stay under way.
class StallingTransport final : public Transport {
 public:
  StallingTransport(std::unique_ptr<Transport> inner, int context) : inner_(std::move(inner)), tag_(2 * context + 1) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const char* name() const override { return inner_->name(); }
  Request send(int peer, const void* data, std::int64_t bytes, int tag) override {
    return tag == tag_ ? &stalled_ : inner_->send(peer, data, bytes, tag);
  }
  Request receive(int peer, void* data, std::int64_t bytes, int tag) override {
    return inner_->receive(peer, data, bytes, tag);
  }
  bool test(Request& request) override { return request != &stalled_ && inner_->test(request); }
  bool cancel(Request& request) noexcept override {
    if (request != &stalled_) return inner_->cancel(request);
    request = nullptr;
    return true;
  }

 private:
  std::unique_ptr<Transport> inner_;
  int tag_;
  int stalled_ = 0;
};

// body(comm) on three ranks whose world communicator, context 1, stalls in transfers from rank 1.
void run_stalling(const char* backend, const std::function<void(Communicator&)>& body) {
  auto ends = test::make_transports(backend, 3);
  ends[1] = std::make_unique<StallingTransport>(std::move(ends[1]), 1);
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<Communicator>> world;
  for (auto& end : ends) world.push_back(make_transport_communicator(std::move(end), {kLong}));
  for (const auto& comm : world) threads.emplace_back([&body, comm] { body(*comm); });
  for (std::thread& thread : threads) thread.join();
}

TEST_P(GroupsTest, ATransferThatAFailureElsewhereBreaksOffIsAnnounced) {
  const auto start = Clock::now();
  run_stalling(GetParam(), [](Communicator& comm) {
    const auto group = comm.split(comm.rank() == 0 ? 0 : 1, 0);  // ranks 1 and 2
    std::vector<float> full(30'000, 1.0f);
    const Work transfer = comm.all_gather({full.data(), 30'000, DType::kF32, {}}, "weights");
    std::string reason;
    if (comm.rank() != 0) {
      EXPECT_FALSE(transfer.wait_for(milliseconds(200)));  // all have met
      reason = error_of(group->barrier(comm.rank() == 1 ? "here" : "there"));
    }
    const std::string error = error_of(transfer);
    if (comm.rank() == 0) {
      EXPECT_SAYS(error, "reports a failure ([comm] ranks are in different collectives: rank 1 is in here");
    } else {
      EXPECT_EQ(error, reason);
    }
  });
  EXPECT_LT(Clock::now() - start, seconds(10));
}

TEST_P(GroupsTest, ATransferThatALeavingRankBreaksOffIsAnnounced) {
  const auto start = Clock::now();
  run_stalling(GetParam(), [](Communicator& comm) {
    const auto group = comm.split(0, comm.rank());
    std::vector<float> full(30'000, 1.0f);
    const Work transfer = comm.all_gather({full.data(), 30'000, DType::kF32, {}}, "weights");
    if (comm.rank() != 1) {
      EXPECT_SAYS(error_of(transfer), " has left (raised ValueError)");
      return;
    }
    EXPECT_FALSE(transfer.wait_for(milliseconds(200)));
    const Work alone = group->barrier("alone");
    comm.leave(Departure::kFailed, "raised ValueError", milliseconds(300));
    for (const Work& work : {alone, transfer}) EXPECT_SAYS(error_of(work), "this rank has left (raised ValueError)");
  });
  EXPECT_LT(Clock::now() - start, seconds(10));
}

TEST_P(GroupsTest, DestroyedWithCollectivesInFlight) {
  std::vector<Work> works;
  test::run_ranks(
      2,
      [&](std::shared_ptr<Communicator> comm) {
        auto group = comm->split(0, comm->rank());
        if (comm->rank() != 0) return;
        for (Communicator* each : {comm.get(), group.get()}) {
          for (int i = 0; i < 3; ++i) works.push_back(each->barrier("never met"));
        }
      },
      {kLong}, GetParam());
  for (const Work& work : works) EXPECT_SAYS(error_of(work), "its communicator was destroyed");
}

INSTANTIATE_TEST_SUITE_P(Backends, GroupsTest, testing::Values("local", "shm"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace zc::comm
