// Memory that peers read in place, and ranks that are processes of their own: killed, stopped, out of memory.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "support/limits.h"
#include "support/ranks.h"

namespace zc::comm {
namespace {

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "it says: " << (text)

void run(int size, const std::function<void(Communicator&)>& body) {
  test::run_ranks(size, [&](std::shared_ptr<Communicator> comm) { body(*comm); }, {kLong}, "shm");
}

// Of a type with memory that peers can read, or not.
template <class T>
struct Buffer {
  Buffer(Communicator& comm, std::int64_t numel, DType dtype, bool shared = true)
      : memory(shared ? comm.allocate(numel * static_cast<std::int64_t>(sizeof(T)))
                      : allocate_host(numel * static_cast<std::int64_t>(sizeof(T)))),
        view{memory.get(), numel, dtype, {}} {}
  T& operator[](std::int64_t at) { return view.as<T>()[at]; }
  Memory memory;
  BufferView view;
};

int num_mappings() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line);) count += line.find("/memfd:zerocore") != std::string::npos;
  return count;
}

int num_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) != -1;
  return count;
}

class ShmTest : public testing::TestWithParam<int> {};

TEST_P(ShmTest, SlicesAreFoldedWhereTheyAre) {
  run(GetParam(), [](Communicator& comm) {
    const std::int64_t n = comm.size();
    for (const std::int64_t numel : {70'000, 4'200'001}) {  // the last one takes several pieces
      Buffer<float> bucket(comm, n * numel, DType::kF32), shard(comm, numel, DType::kF32);
      for (std::int64_t i = 0; i < n * numel; ++i) bucket[i] = static_cast<float>(i % 1000 + 1000 * comm.rank());
      for (int round = 1; round <= 3; ++round) {
        comm.reduce_scatter_add(bucket.view, shard.view, "sum").wait();
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < numel; ++i) {
          const auto at = (comm.rank() * numel + i) % 1000;
          const auto sum = static_cast<float>(round) * static_cast<float>(n * at + 1000 * n * (n - 1) / 2);
          wrong += shard[i] != sum;
        }
        ASSERT_EQ(wrong, 0) << "round " << round;
      }
      ASSERT_EQ(bucket[n * numel - 1], static_cast<float>((n * numel - 1) % 1000 + 1000 * comm.rank()));
    }
    EXPECT_EQ(comm.staging_bytes(), 0);
  });
}

TEST_P(ShmTest, TheFoldHasTheBitsOfOtherBackends) {
  const int size = GetParam();
  constexpr std::int64_t kNumel = 100'003;
  const auto fold = [&](std::string_view backend, DType shard_dtype) {
    std::vector<std::vector<std::byte>> shards(static_cast<std::size_t>(size));
    test::run_ranks(
        size,
        [&](std::shared_ptr<Communicator> comm) {
          Buffer<std::uint16_t> bucket(*comm, size * kNumel, DType::kBF16);
          Buffer<float> shard(*comm, kNumel, shard_dtype);
          std::uint32_t random = 1 + static_cast<std::uint32_t>(comm->rank());
          for (std::int64_t i = 0; i < size * kNumel; ++i) {
            random = random * 1664525u + 1013904223u;
            bucket[i] = static_cast<std::uint16_t>((random >> 16 & 0x80ff) | 0x3f00);  // 0.5 to 2, both signs
          }
          for (int round = 0; round < 2; ++round) {
            comm->reduce_scatter_add(bucket.view, shard.view, "sum").wait();
          }
          EXPECT_EQ(comm->staging_bytes() == 0, backend == "shm" || size == 1);
          auto& out = shards[static_cast<std::size_t>(comm->rank())];
          out.assign(shard.memory.get(), shard.memory.get() + shard.view.bytes());
        },
        {kLong}, backend);
    return shards;
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    EXPECT_EQ(fold("shm", dtype), fold("local", dtype));
}

TEST_P(ShmTest, ShardsAreGatheredFromWhereTheyAre) {
  run(GetParam(), [](Communicator& comm) {
    const std::int64_t n = comm.size(), rank = comm.rank();
    for (const std::int64_t numel : {40'000, 8'400'001}) {
      const auto value = [numel](std::int64_t at) { return static_cast<std::uint16_t>(at % 977 + at / numel); };
      const auto expect_all = [&](Buffer<std::uint16_t>& full) {
        std::int64_t wrong = 0;
        for (std::int64_t at = 0; at < n * numel; ++at) wrong += full[at] != value(at);
        ASSERT_EQ(wrong, 0);
      };
      Buffer<std::uint16_t> full(comm, n * numel, DType::kBF16), shard(comm, numel, DType::kBF16),
          other(comm, n * numel, DType::kBF16, false);
      for (std::int64_t at = 0; at < numel; ++at) shard[at] = full[rank * numel + at] = value(rank * numel + at);
      comm.all_gather(full.view, "in place").wait();
      expect_all(full);
      comm.all_gather(shard.view, other.view, "from a shard").wait();
      expect_all(other);
    }
    EXPECT_EQ(comm.staging_bytes(), 0);
  });
}

TEST_P(ShmTest, BroadcastReadsTheRootsMemory) {
  run(GetParam(), [](Communicator& comm) {
    for (int root = 0; root < comm.size(); ++root) {
      for (const bool all_shared : {true, false}) {
        Buffer<std::uint8_t> data(comm, 17'000'003, DType::kU8, all_shared || comm.rank() == root);
        std::memset(data.memory.get(), comm.rank() + 1, 17'000'003);
        comm.broadcast(data.view, root, "broadcast").wait();
        ASSERT_EQ(std::count(data.view.as<std::uint8_t>(), data.view.as<std::uint8_t>() + 17'000'003, root + 1),
                  17'000'003);
      }
    }
  });
}

TEST_P(ShmTest, MemoryOfOneRankThatPeersCannotReadIsSent) {
  run(GetParam(), [](Communicator& comm) {
    const std::int64_t n = comm.size(), numel = 200'000;
    Buffer<float> bucket(comm, n * numel, DType::kF32, comm.rank() != comm.size() - 1), shard(comm, numel, DType::kF32);
    std::fill_n(bucket.view.as<float>(), n * numel, static_cast<float>(1 << comm.rank()));
    for (int round = 1; round <= 2; ++round) {
      comm.reduce_scatter_add(bucket.view, shard.view, "sum").wait();
      ASSERT_EQ(shard[numel - 1], static_cast<float>(round * ((1 << n) - 1)));
    }
    EXPECT_EQ(comm.staging_bytes() > 0, n > 1);
  });
}

TEST_P(ShmTest, BuffersAreTheCallersAgainAfterTheWait) {
  run(GetParam(), [](Communicator& comm) {
    const std::int64_t n = comm.size(), numel = 50'000;
    Buffer<float> bucket(comm, n * numel, DType::kF32), shard(comm, numel, DType::kF32),
        full(comm, n * numel, DType::kF32);
    for (int round = 0; round < 200; ++round) {
      const auto own = static_cast<float>(round + comm.rank());
      std::fill_n(bucket.view.as<float>(), n * numel, own);
      std::fill_n(shard.view.as<float>(), numel, 0.0f);
      std::fill_n(full.view.as<float>() + comm.rank() * numel, numel, own);
      const Work reduce = comm.reduce_scatter_add(bucket.view, shard.view, "sum");
      const Work gather = comm.all_gather(full.view, "gather");
      reduce.wait();
      std::fill_n(bucket.view.as<float>(), n * numel, -1.0f);
      gather.wait();
      const auto sum = static_cast<float>(n * round + n * (n - 1) / 2);
      ASSERT_EQ(shard[0], sum);
      ASSERT_EQ(shard[numel - 1], sum);
      for (std::int64_t r = 0; r < n; ++r) ASSERT_EQ(full[(r + 1) * numel - 1], static_cast<float>(round + r));
    }
  });
}

// The progress thread is called while the caller, who waits already, does the work.
TEST_P(ShmTest, WhoeverDrivesNothingIsDoneTwice) {
  run(GetParam(), [](Communicator& comm) {
    const auto other = comm.split(0, comm.rank());
    const std::int64_t n = comm.size(), numel = 20'000;
    Buffer<float> full(comm, n * numel, DType::kF32);
    for (int round = 0; round < 1000; ++round) {
      full[comm.rank() * numel] = static_cast<float>(round + comm.rank());
      if (round % n == comm.rank()) std::this_thread::sleep_for(std::chrono::microseconds(round % 300));
      const Work gather = comm.all_gather(full.view, "gather");
      if (round % 3 == 0) other->barrier("beside it").wait();
      if (round % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(round % 100));
      gather.wait();
      for (std::int64_t r = 0; r < n; ++r) ASSERT_EQ(full[r * numel], static_cast<float>(round + r));
      ASSERT_EQ(comm.failure(), "");
      comm.barrier("read").wait();
    }
    comm.leave(Departure::kEnded, "ended its script", kLong);
    EXPECT_EQ(comm.failure(), "");
  });
}

TEST_P(ShmTest, FreedMemoryIsLetGoOfByAll) {
  run(GetParam(), [](Communicator& comm) {
    const std::int64_t numel = 30'000;
    comm.barrier("start").wait();
    int before = 0, descriptors = 0;
    if (comm.rank() == 0) {  // one at a time: counting opens a file
      before = num_mappings();
      descriptors = num_descriptors();
    }
    comm.barrier("counted").wait();
    for (int round = 0; round < 50; ++round) {
      std::vector<Buffer<float>> kept;  // several unknown to the peers at once, named in another order
      for (int k = 0; k < 3; ++k) kept.emplace_back(comm, comm.size() * numel, DType::kF32);
      for (int k = 2; k >= 0; --k) {
        auto& full = kept[static_cast<std::size_t>(k)];
        full[comm.rank() * numel] = static_cast<float>(round + k);
        comm.all_gather(full.view, "gather").wait();
        for (int r = 0; r < comm.size(); ++r) ASSERT_EQ(full[r * numel], static_cast<float>(round + k));
      }
    }
    comm.barrier("all freed").wait();
    {
      Buffer<float> last(comm, numel, DType::kF32);
    }
    comm.barrier("all have let go").wait();
    if (comm.rank() == 0) {
      EXPECT_EQ(num_mappings(), before);
      EXPECT_EQ(num_descriptors(), descriptors);
    }
    comm.barrier("end").wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmTest, testing::Values(1, 2, 3, 4));

TEST(ShmConnectTest, AllRanksLearnWhoCannotReachWhom) {
  test::Meeting meeting(3);
  std::vector<std::string> reasons(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      bool first = true;
      const auto exchange = [&](std::span<const std::byte> own, std::span<std::byte> all) {
        meeting.exchange(rank, own, all);
        if (rank == 2 && first) all[own.size()] ^= std::byte{1};  // rank 1's name, as from another node
        first = false;
      };
      EXPECT_EQ(connect_shm(rank, 3, exchange, &reasons[static_cast<std::size_t>(rank)]), nullptr);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& reason : reasons) EXPECT_EQ(reason, "rank 2: it cannot reach rank 1: Connection refused");
}

TEST(ShmMemoryTest, OutlivesItsCommunicator) {
  Memory memory;
  {
    const auto world = test::make_world("shm", 1, {kLong});
    memory = world[0]->allocate(1 << 20);
  }
  memory[5] = std::byte{7};
  EXPECT_EQ(memory[5], std::byte{7});
}

TEST(ShmMemoryTest, AForkedChildThatFreesItTakesNothingFromItsParent) {
  const auto world = test::make_world("shm", 1, {kLong});
  Memory memory = world[0]->allocate(1 << 20);
  memory[5] = std::byte{7};
  const pid_t child = fork();
  if (child == 0) {
    memory = nullptr;
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory[5], std::byte{7});
}

TEST(ShmMemoryTest, TooMuchIsTheNamedError) {
  const auto world = test::make_world("shm", 1, {kLong});
  const auto error_of = [&](std::int64_t bytes) {
    try {
      world[0]->allocate(bytes);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDevice);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_SAYS(error_of(std::int64_t{1} << 50),
              "[comm] out of shared memory: got no 1125899906842624 bytes, the machine has");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error = error_of(2 << 20);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_SAYS(error, "[comm] out of shared memory: got no 2097152 bytes: File too large");
  world[0]->allocate(2 << 20);
}

// --- Ranks that are processes

// Forks `size` ranks, each of which runs body(comm) and ends with its result, or 99 where it throws.
class Processes {
 public:
  Processes(int size, milliseconds timeout, const std::function<int(Communicator&)>& body) : meeting_(size) {
    for (int rank = 0; rank < size; ++rank) {
      const pid_t child = fork();
      if (child == 0) _exit(run(rank, size, timeout, body));
      children_.push_back(child);
    }
  }
  ~Processes() {
    for (const pid_t child : children_) {
      if (child != 0) kill(child, SIGKILL);
    }
    for (const pid_t child : children_) {
      if (child != 0) waitpid(child, nullptr, 0);
    }
  }

  const std::vector<pid_t>& children() const { return children_; }

  void send(int rank, int signal) const { kill(children_[static_cast<std::size_t>(rank)], signal); }

  // The exit code, or minus the signal.
  int wait(int rank) {
    int status = 0;
    waitpid(std::exchange(children_[static_cast<std::size_t>(rank)], 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  int run(int rank, int size, milliseconds timeout, const std::function<int(Communicator&)>& body) {
    try {
      const auto comm = make_transport_communicator(test::connect_shm(meeting_, rank, size), {timeout});
      if (!comm->watch_processes().empty()) return 98;
      return body(*comm);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      return 99;
    }
  }

  test::Meeting meeting_;
  std::vector<pid_t> children_;
};

constexpr int kNamed = 3;

// Goes on until the group breaks; kNamed where the error says `part`.
int train_until_it_breaks(Communicator& comm, std::string_view part) {
  try {
    const std::int64_t numel = 100'000;
    Buffer<float> bucket(comm, comm.size() * numel, DType::kF32), shard(comm, numel, DType::kF32);
    for (;;) {
      const Work reduce = comm.reduce_scatter_add(bucket.view, shard.view, "bucket");
      std::int64_t flag = comm.rank();
      comm.all_reduce({&flag, 1}, ReduceOp::kMax, "flag").wait();
      reduce.wait();
      Buffer<float> full(comm, comm.size() * numel, DType::kF32);  // memory comes and goes
      comm.all_gather(full.view, "weights").wait();
    }
  } catch (const Error& error) {
    const bool named = std::string_view(error.what()).find(part) != std::string_view::npos;
    if (!named) std::fprintf(stderr, "rank %d: %s\n", comm.rank(), error.what());
    return named && error.kind() == ErrorKind::kComm ? kNamed : 1;
  }
}

TEST(ShmProcessTest, AllCollectivesWorkBetweenProcesses) {
  Processes ranks(3, kLong, [](Communicator& comm) {
    const std::int64_t numel = 300'000;
    Buffer<float> bucket(comm, 3 * numel, DType::kF32), shard(comm, numel, DType::kF32),
        full(comm, 3 * numel, DType::kF32);
    std::fill_n(bucket.view.as<float>(), 3 * numel, static_cast<float>(1 << comm.rank()));
    std::vector<float> other(3 * static_cast<std::size_t>(numel), 1.0f);  // goes through the rings
    for (int round = 1; round <= 20; ++round) {
      comm.reduce_scatter_add(bucket.view, shard.view, "sum").wait();
      comm.all_gather(shard.view, full.view, "gather").wait();
      comm.broadcast({other.data(), 3 * numel, DType::kF32, {}}, round % 3, "staged").wait();
      for (const std::int64_t at : {std::int64_t{0}, numel, 3 * numel - 1}) {
        if (full[at] != static_cast<float>(7 * round)) return 1;
      }
    }
    comm.leave(Departure::kEnded, "ended its script", kLong);
    return 0;
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.wait(rank), 0);
}

// A large model has more buckets than files may be open, as a rule.
TEST(ShmProcessTest, ManyBuffersRaiseTheLimitOfOpenFiles) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GE(limit.rlim_max, 1000u);
  limit.rlim_cur = 100;
  Processes ranks(2, kLong, [&](Communicator& comm) {
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 97;
    std::vector<Memory> buffers;
    for (int i = 0; i < 200; ++i) buffers.push_back(comm.allocate(1 << 17));
    for (const Memory& buffer : buffers) {
      std::memset(buffer.get() + comm.rank() * (1 << 16), comm.rank() + 1, 1 << 16);
      comm.all_gather({buffer.get(), 1 << 17, DType::kU8, {}}, "buffer").wait();
      if (buffer[0] != std::byte{1} || buffer[(1 << 17) - 1] != std::byte{2}) return 1;
    }
    return 0;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

TEST(ShmProcessTest, AKilledRankIsNamedByTheOthersWithinMoments) {
  Processes ranks(3, kLong, [](Communicator& comm) { return train_until_it_breaks(comm, "rank 1 has died"); });
  std::this_thread::sleep_for(milliseconds(300));
  const auto start = Clock::now();
  ranks.send(1, SIGKILL);
  for (const int rank : {0, 2}) EXPECT_EQ(ranks.wait(rank), kNamed);
  EXPECT_LT(Clock::now() - start, seconds(5));
}

TEST(ShmProcessTest, AStoppedRankIsNamedAfterTheTimeout) {
  Processes ranks(2, milliseconds(700), [](Communicator& comm) {
    return train_until_it_breaks(comm,
                                 comm.rank() == 0 ? "[comm] timed out after 0.7 s in " : "rank 0 reports a failure");
  });
  std::this_thread::sleep_for(milliseconds(300));
  ranks.send(1, SIGSTOP);
  EXPECT_EQ(ranks.wait(0), kNamed);
  ranks.send(1, SIGCONT);
  EXPECT_NE(ranks.wait(1), 0);
}

bool has_file() {
  return std::ranges::any_of(std::filesystem::directory_iterator("/dev/shm"), [](const auto& entry) {
    return entry.path().filename().string().find("zerocore") != std::string::npos;
  });
}

// Other jobs of this machine may have such sockets, too.
bool has_listener_of(const std::set<pid_t>& processes) {
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    const auto at = line.find("@zerocore-");
    if (at != std::string::npos && processes.contains(std::atoi(line.c_str() + at + 10))) return true;
  }
  return false;
}

// `make soak` kills 1000.
TEST(ShmProcessTest, KilledGroupsLeaveNothingBehind) {
  const char* const wanted = std::getenv("ZC_TEST_KILLED_GROUPS");
  const int num_groups = wanted != nullptr ? std::atoi(wanted) : 10;
  const int descriptors = num_descriptors();
  std::set<pid_t> killed;
  std::minstd_rand random(7);
  for (int group = 0; group < num_groups; ++group) {
    const int size = 2 + group % 3;
    Processes ranks(size, kLong, [](Communicator& comm) { return train_until_it_breaks(comm, "has died"); });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));  // some while they still connect
    const int first = static_cast<int>(random() % static_cast<unsigned>(size));
    ranks.send(first, SIGKILL);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 10'000));
    killed.insert(ranks.children().begin(), ranks.children().end());
  }  // and now the others, in whatever they are
  EXPECT_EQ(num_descriptors(), descriptors);
  const auto deadline = Clock::now() + seconds(5);  // the kernel may close sockets a moment after their processes
  while (has_listener_of(killed) && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_FALSE(has_listener_of(killed));
  EXPECT_FALSE(has_file());
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);  // no process
}

}  // namespace
}  // namespace zc::comm
