// Ranks that are processes, and are killed: the others learn of it within moments. And who only leaves is not dead.
#include "zc/comm/liveness.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "zc/comm/local_transport.h"

namespace zc::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr seconds kSoon{5};

bool within(Clock::duration limit, const std::function<bool()>& condition) {
  const auto deadline = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// Ranks in this process, all connected.
class World {
 public:
  explicit World(int size) {
    std::vector<Liveness::Contact> contacts;
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Liveness>(rank, size));
      contacts.push_back(ranks_.back()->contact());
    }
    for (auto& rank : ranks_) EXPECT_EQ(rank->start(contacts), "");
    port_ = contacts[0].port;
  }
  Liveness& operator[](int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  void end(int rank) { ranks_[static_cast<std::size_t>(rank)].reset(); }
  std::uint16_t port() const { return port_; }

 private:
  std::vector<std::unique_ptr<Liveness>> ranks_;
  std::uint16_t port_ = 0;
};

TEST(LivenessTest, TheEndOfARankIsSeenByAllOthersAndIsItsAlone) {
  World world(4);
  world.end(2);
  for (const int rank : {0, 1, 3}) {
    EXPECT_TRUE(within(kSoon, [&] { return world[rank].is_dead(2); })) << rank;
    EXPECT_EQ(world[rank].num_dead(), 1);
  }
  world.end(0);
  for (const int rank : {1, 3}) EXPECT_TRUE(within(kSoon, [&] { return world[rank].is_dead(0); })) << rank;
  EXPECT_EQ(world[3].num_dead(), 2);
}

TEST(LivenessTest, ARankThatSaysGoodbyeIsNotDead) {
  World world(3);
  world[1].goodbye();
  world.end(1);
  world.end(2);  // its death is known after the end of rank 1 is
  EXPECT_TRUE(within(kSoon, [&] { return world[0].num_dead() > 0; }));
  EXPECT_FALSE(world[0].is_dead(1));

  World other(2);
  other[0].goodbye();
  other.end(0);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(other[1].num_dead(), 0);
}

TEST(LivenessTest, StrangersAreNobody) {
  std::vector<Liveness::Contact> contacts;
  std::vector<std::unique_ptr<Liveness>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(std::make_unique<Liveness>(rank, 2));
    contacts.push_back(ranks.back()->contact());
  }
  EXPECT_EQ(ranks[0]->start(contacts), "");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(contacts[0].port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (const std::size_t bytes : {0, 3, 4096}) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    const std::vector<char> noise(bytes, 1);  // of a hello of rank 1 it has all but the token
    send(fd, noise.data(), bytes, MSG_NOSIGNAL);
    close(fd);
  }
  EXPECT_EQ(ranks[1]->start(contacts), "");
  EXPECT_EQ(ranks[0]->num_dead(), 0);
  ranks[1].reset();
  EXPECT_TRUE(within(kSoon, [&] { return ranks[0]->is_dead(1); }));
}

TEST(LivenessTest, WhereRanksCannotReachEachOtherItSaysWhy) {
  Liveness rank(1, 2);
  std::vector<Liveness::Contact> contacts(2, rank.contact());
  EXPECT_EQ(rank.start(contacts), "rank 0 cannot listen on the loopback interface");
  std::strcpy(contacts[0].host, "another");
  EXPECT_EQ(rank.start(contacts), "rank 1 is on another host than rank 0");
  contacts[0] = rank.contact();
  contacts[0].port = 1;  // nobody listens there
  EXPECT_EQ(rank.start(contacts), "no connection to rank 0 over the loopback interface: Connection refused");
}

// Three processes; `victim` is killed while a child that it has forked lives on. Each other one ends with exit code 0
// once it knows of the death, and of no other.
void kill_one_of_three(int victim) {
  constexpr int kSize = 3;
  struct Shared {
    Liveness::Contact contacts[kSize];
    std::atomic<int> contacts_made;
    std::atomic<int> ready;
    std::atomic<pid_t> worker;
  };
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const shared = new (memory) Shared{};
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    ranks.push_back(pid);
    if (pid != 0) continue;
    alarm(20);
    Liveness liveness(rank, kSize);
    shared->contacts[rank] = liveness.contact();
    ++shared->contacts_made;
    if (!within(kSoon, [&] { return shared->contacts_made == kSize; })) _exit(2);
    if (!liveness.start(shared->contacts).empty()) _exit(3);
    if (rank == victim) {
      const pid_t worker = fork();  // as a data loader forks its workers
      if (worker == 0) {
        alarm(20);
        pause();
      }
      shared->worker = worker;
    }
    ++shared->ready;
    const bool seen = within(2 * kSoon, [&] { return liveness.is_dead(victim); });
    const bool none_else = liveness.num_dead() == 1;
    liveness.goodbye();
    _exit(seen && none_else ? 0 : 4);
  }
  EXPECT_TRUE(within(kSoon, [&] { return shared->ready == kSize; }));
  kill(ranks[static_cast<std::size_t>(victim)], SIGKILL);
  for (int rank = 0; rank < kSize; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(ranks[static_cast<std::size_t>(rank)], &status, 0), ranks[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(rank == victim ? 0 : status, 0) << "rank " << rank;
  }
  if (shared->worker > 0) kill(shared->worker, SIGKILL);
  munmap(memory, sizeof(Shared));
}

TEST(LivenessTest, AKilledProcessIsSeenThoughItsForkedChildLivesOn) { kill_one_of_three(2); }

TEST(LivenessTest, SoIsRank0) { kill_one_of_three(0); }

// --- With the guard. The process of a rank is gone when its communicator is, without leave().

struct Killed {
  std::vector<std::shared_ptr<Communicator>> world;
  std::vector<std::string> errors;  // of the others

  // Rank `victim` dies after `before`, which every rank runs; the others go on with `after`.
  Killed(int size, int victim, const std::function<void(Communicator&)>& before,
         const std::function<void(Communicator&)>& after)
      : world(make_local_world(size, {seconds(30)})), errors(world.size()) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        auto& comm = world[static_cast<std::size_t>(rank)];
        EXPECT_EQ(comm->watch_processes(), "");
        comm->set_activity("step 41");
        before(*comm);
        if (rank == victim) {
          comm.reset();
          return;
        }
        try {
          after(*comm);
        } catch (const Error& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST(LivenessTest, ADeadRankIsNamedWithWhatTheOthersDo) {
  for (const int victim : {0, 2}) {
    const auto start = Clock::now();
    const Killed job(
        3, victim, [](Communicator& comm) { comm.barrier("step done").wait(); },
        [](Communicator& comm) { comm.barrier("reduce bucket 7").wait(); });
    EXPECT_LT(Clock::now() - start, kSoon);
    const std::string dead = "rank " + std::to_string(victim);
    for (const int rank : {0, 1, 2}) {
      if (rank == victim) continue;
      const std::string& error = job.errors[static_cast<std::size_t>(rank)];
      EXPECT_NE(
          error.find("[comm] " + dead + " has died (its process is gone: killed or crashed) while others need it"),
          std::string::npos)
          << error;
      EXPECT_NE(error.find("rank 1 is in step 41, reduce bucket 7"), std::string::npos) << error;
      EXPECT_NE(error.find("Look at the output of " + dead + " first."), std::string::npos) << error;
    }
  }
}

TEST(LivenessTest, ADeathInTheMiddleOfATransferEndsIt) {
  constexpr std::int64_t kNumel = std::int64_t{8} << 20;
  std::vector<float> full(3 * kNumel);
  const Killed job(
      3, 2,
      [&](Communicator& comm) {
        if (comm.rank() != 2) return;
        comm.all_gather({full.data(), 3 * kNumel, DType::kF32, {}}, "weights");
        std::this_thread::sleep_for(milliseconds(1));
      },
      [](Communicator& comm) {
        std::vector<float> own(3 * kNumel);
        comm.all_gather({own.data(), 3 * kNumel, DType::kF32, {}}, "weights").wait();
        comm.barrier("next").wait();  // where all of it had been sent before
      });
  for (const int rank : {0, 1}) {
    const std::string& error = job.errors[static_cast<std::size_t>(rank)];
    EXPECT_NE(error.find("rank 2 has died"), std::string::npos) << error;
  }
}

TEST(LivenessTest, WhoHasLeftDoesNotWaitForTheDead) {
  const auto start = Clock::now();
  const Killed job(
      3, 1, [](Communicator& comm) { comm.barrier("last").wait(); },
      [](Communicator& comm) { comm.leave(Departure::kEnded, "ended its script", seconds(30)); });
  EXPECT_LT(Clock::now() - start, kSoon);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(job.world[static_cast<std::size_t>(rank)]->failure(),
              "[comm] rank 1 has failed: its process is gone: killed or crashed");
  }
}

TEST(LivenessTest, RanksThatLeaveInOrderAreNotTakenForDead) {
  const auto world = make_local_world(3, {seconds(30)});
  std::vector<std::thread> threads;
  for (const auto& comm : world) {
    threads.emplace_back([&comm] {
      EXPECT_EQ(comm->watch_processes(), "");
      comm->barrier("last").wait();
      std::this_thread::sleep_for(milliseconds(20 * comm->rank()));
      comm->leave(Departure::kEnded, "ended its script", seconds(30));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& comm : world) EXPECT_EQ(comm->failure(), "");
}

}  // namespace
}  // namespace zc::comm
